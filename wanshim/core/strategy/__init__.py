"""The strategy of a training job: the job and the machine's limits as data, the decision, and the plan."""

from wanshim.core.strategy.agree import (
    check_alike,
    failing_together,
    gathered,
    idle_on_all,
    kept_on_all,
    least_of_all,
    output_folders,
)
from wanshim.core.strategy.block_trace import trace_block
from wanshim.core.strategy.candidates import CHUNK_TOKENS
from wanshim.core.strategy.job import Limits, Request, SideModel, TrainingJob, Video
from wanshim.core.strategy.limits import available_on
from wanshim.core.strategy.plan import TrainingPlan
from wanshim.core.strategy.predict import KeptOn, MicroBatch, Stored, store_of
from wanshim.core.strategy.search import decide, decide_again
from wanshim.values import Strategy

__all__ = [
    "CHUNK_TOKENS",
    "KeptOn",
    "Limits",
    "MicroBatch",
    "Request",
    "SideModel",
    "Stored",
    "Strategy",
    "TrainingJob",
    "TrainingPlan",
    "Video",
    "available_on",
    "check_alike",
    "decide",
    "decide_again",
    "failing_together",
    "gathered",
    "idle_on_all",
    "kept_on_all",
    "least_of_all",
    "output_folders",
    "store_of",
    "trace_block",
]
