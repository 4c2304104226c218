"""Checkpoint offload: what gradient checkpointing keeps waits in host memory, copied while the GPU computes."""

from wanshim.core.placement.offload.offload import CheckpointOffload, OffloadCount

__all__ = ["CheckpointOffload", "OffloadCount"]
