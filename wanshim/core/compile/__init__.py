"""Transformer blocks as one compiled graph."""

from wanshim.core.compile.blocks import CompiledBlocks, compiler_refusal, graph_limits
from wanshim.core.compile.rotary import rotate_pairs

__all__ = ["CompiledBlocks", "compiler_refusal", "graph_limits", "rotate_pairs"]
