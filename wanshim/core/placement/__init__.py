"""Model split: one model over several devices in one process."""

from wanshim.core.placement.plan import SplitPlan, Stage, plan_split
from wanshim.core.placement.split import Companion, SplitHandle, find_blocks, split_model, split_of

__all__ = ["Companion", "SplitHandle", "SplitPlan", "Stage", "find_blocks", "plan_split", "split_model", "split_of"]
