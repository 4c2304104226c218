"""What a split training step needs on each device, before it runs."""

from wanshim.core.placement.memory.fit import Proposal, available_on, check_fit, split_points_that_fit
from wanshim.core.placement.memory.predict import DevicePeak, Job, MicroBatch, Stored, predict, store_of
from wanshim.core.placement.memory.trace import Working, trace_block

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
