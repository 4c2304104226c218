"""Generation: the forwards of one process's pipeline over all GPUs, by workers that hold copies of its models."""

from .binding import Forward, NotShared, Offload, PipelineBinding
from .decide import decide
from .first_forward import count_tokens, few_tokens
from .job import GenerationJob, Limits, Request
from .own_code import is_own, own_methods, why_other_function
from .plan import GenerationPlan
from .shared_pipeline import SharedPipeline

__all__ = [
    "Forward",
    "GenerationJob",
    "GenerationPlan",
    "Limits",
    "NotShared",
    "Offload",
    "PipelineBinding",
    "Request",
    "SharedPipeline",
    "count_tokens",
    "decide",
    "few_tokens",
    "is_own",
    "own_methods",
    "why_other_function",
]
