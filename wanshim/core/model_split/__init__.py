"""Model split: one model over several devices in one process."""

from wanshim.core.model_split.pin import KeepHandle, keep_on
from wanshim.core.model_split.plan import SplitPlan, Stage, plan_split
from wanshim.core.model_split.split import Companion, SplitHandle, find_blocks, split_model, split_of

__all__ = [
    "Companion",
    "KeepHandle",
    "SplitHandle",
    "SplitPlan",
    "Stage",
    "find_blocks",
    "keep_on",
    "plan_split",
    "split_model",
    "split_of",
]
