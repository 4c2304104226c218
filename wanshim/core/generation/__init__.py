"""Generation: the forwards of one process's pipeline over all GPUs, by workers that hold copies of its models."""

from .binding import Forward, NotShared, Offload, PipelineBinding
from .first_forward import count_tokens, few_tokens
from .job import Request
from .own_code import is_own, own_methods, why_other_function
from .plan import GenerationPlan
from .shared_pipeline import SharedPipeline

__all__ = [
    "Forward",
    "GenerationPlan",
    "NotShared",
    "Offload",
    "PipelineBinding",
    "Request",
    "SharedPipeline",
    "count_tokens",
    "few_tokens",
    "is_own",
    "own_methods",
    "why_other_function",
]
