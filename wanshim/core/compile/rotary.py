"""Rotary position embedding in real arithmetic: no compiler fuses complex numbers."""

from __future__ import annotations

import torch


def rotate_pairs(x: torch.Tensor, frequencies: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Turn each pair of neighbouring channels of a head by its token's angle, in fp32 or in `x`'s dtype if it is wider.

    The angles come as fp64 cosine and sine, so fp32 rounds the product by 2**-24 of its size at most a few times, where
    the result is then rounded to bf16 by 2**-9.

    Method: RoFormer (Su et al. 2021, arXiv:2104.09864).

    Args:
        x: (batch, tokens, heads * dim).
        frequencies: (tokens, 1, dim / 2, 2): pairs of cosine and sine.

    Returns:
        Shape and dtype of `x`.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    even, odd = x.unflatten(2, (num_heads, -1, 2)).to(dtype).unbind(-1)
    cosine, sine = frequencies.to(dtype).unbind(-1)
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(2).to(x.dtype)
