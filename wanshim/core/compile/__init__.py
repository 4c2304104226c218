"""Transformer blocks as one compiled graph."""

from wanshim.core.compile.blocks import CompiledBlocks, compiler_refusal
from wanshim.core.compile.rotary import rotate_pairs

__all__ = ["CompiledBlocks", "compiler_refusal", "rotate_pairs"]
