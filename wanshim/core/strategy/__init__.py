"""What a split training step needs on each device, before it runs."""

from wanshim.core.strategy.block_trace import Working, trace_block
from wanshim.core.strategy.limits import Proposal, available_on, check_fit, split_points_that_fit
from wanshim.core.strategy.predict import DevicePeak, Job, MicroBatch, Stored, predict, store_of

__all__ = [
    "DevicePeak",
    "Job",
    "MicroBatch",
    "Proposal",
    "Stored",
    "Working",
    "available_on",
    "check_fit",
    "predict",
    "split_points_that_fit",
    "store_of",
    "trace_block",
]
