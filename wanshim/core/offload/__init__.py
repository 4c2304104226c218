"""Checkpoint offload: what gradient checkpointing keeps waits in host memory, copied while the GPU computes."""

from wanshim.core.offload.checkpoints import CheckpointOffload

__all__ = ["CheckpointOffload"]
