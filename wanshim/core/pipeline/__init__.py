"""Pipelined micro-batches in one process: the stages of a split work at the same time."""

from wanshim.core.pipeline.micro_batch import in_lane
from wanshim.core.pipeline.pending_loss import PendingLoss
from wanshim.core.pipeline.pipeline import Lanes, refusal
from wanshim.core.pipeline.schedule import pipeline_bound
from wanshim.core.pipeline.timeline import Trace, draw

__all__ = ["Lanes", "PendingLoss", "Trace", "draw", "in_lane", "pipeline_bound", "refusal"]
