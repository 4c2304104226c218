"""Model split: one model over several devices in one process."""

from wanshim.core.model_split.pin import pin_to
from wanshim.core.model_split.plan import SplitPlan
from wanshim.core.model_split.split import Companion, SplitHandle, split_model, split_of

__all__ = [
    "Companion",
    "SplitHandle",
    "SplitPlan",
    "pin_to",
    "split_model",
    "split_of",
]
