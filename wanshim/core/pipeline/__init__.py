"""Pipelined micro-batches in one process: the stages of a split work at the same time."""

from wanshim.core.pipeline.micro_batch import in_pipeline
from wanshim.core.pipeline.pending_loss import PendingLoss
from wanshim.core.pipeline.pipeline import Pipeline, refusal

__all__ = ["Pipeline", "PendingLoss", "in_pipeline", "refusal"]
