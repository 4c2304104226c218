"""Model split: one model over several devices in one process."""

from wanshim.core.model_split.pin import pin_to
from wanshim.core.model_split.plan import SplitPlan, plan_split
from wanshim.core.model_split.split import Companion, SplitHandle, find_blocks, split_model, split_of

__all__ = [
    "Companion",
    "SplitHandle",
    "SplitPlan",
    "find_blocks",
    "pin_to",
    "plan_split",
    "split_model",
    "split_of",
]
