"""Recomputation in backward: what of a checkpointed block is kept, so that it is not computed again."""

from wanshim.core.recompute.kept_attention import KeptAttention
from wanshim.core.recompute.kept_blocks import KeptBlocks

__all__ = ["KeptAttention", "KeptBlocks"]
