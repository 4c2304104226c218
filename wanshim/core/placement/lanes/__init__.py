"""Pipelined micro-batches in one process: the stages of a split work at the same time."""

from wanshim.core.placement.lanes.lane import in_lane
from wanshim.core.placement.lanes.lanes import Lanes, refusal
from wanshim.core.placement.lanes.pending import PendingLoss
from wanshim.core.placement.lanes.schedule import pipeline_bound
from wanshim.core.placement.lanes.trace import Trace, draw

__all__ = ["Lanes", "PendingLoss", "Trace", "draw", "in_lane", "pipeline_bound", "refusal"]
