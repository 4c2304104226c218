"""Everything between two convolutions in one pass: bias, residual, norm, SiLU, order of frames, duplication.

Each function writes into a given tensor. On CUDA with Triton it is one kernel (`fast_kernels.py`); elsewhere the same
arithmetic in torch: sums and norms in fp32 (or fp64), one rounding at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from wanshim.core.decoding.model.graph import Duplicate, Norm

from . import fast_kernels
from .layout import duplicate


def load(device: torch.device) -> None:
    """Let Triton load, which takes half a second in a process."""
    x = torch.zeros((1, 1, 1, 16, 8), dtype=torch.bfloat16, device=device).permute(0, 4, 1, 2, 3)
    if fast_kernels.usable(x):
        fast_kernels.sum_into(x, None, None, x)


def sum_into(main: torch.Tensor, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = main + bias + skip."""
    if fast_kernels.usable(main, skip, out):
        fast_kernels.sum_into(main, bias, skip, out)
        return
    out.copy_(_sum(main, bias, skip))


def norm_into(
    main: torch.Tensor,
    bias: torch.Tensor | None,
    skip: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor,
    *,
    silu: bool,
    keep: bool,
) -> None:
    """out = silu(norm(main + bias + skip)); with `keep` the sum stays in `main`, for the residual."""
    if fast_kernels.usable(main, skip, out):
        fast_kernels.norm_into(main, bias, skip, norm, out, silu=silu, keep=keep)
        return
    total = _sum(main, bias, skip)
    value = _wide(total)
    value = value / torch.linalg.vector_norm(value, dim=1, keepdim=True).clamp_min(norm.eps)
    value = value * (norm.gamma.to(value.dtype) * norm.scale).view(1, -1, 1, 1, 1)
    if norm.bias is not None:
        value = value + norm.bias.to(value.dtype).view(1, -1, 1, 1, 1)
    out.copy_(F.silu(value) if silu else value)
    if keep and total is not main:
        main.copy_(total)


def interleave_into(
    main: torch.Tensor, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out = main + bias + skip; the halves of the channels become the even and the odd frames."""
    biases = (None, None) if bias is None else bias.chunk(2)
    skips = (None, None) if skip is None else skip.chunk(2, 1)
    for half, part in enumerate(main.chunk(2, 1)):
        sum_into(part, biases[half], skips[half], out[:, :, half::2])


def phases_into(phases: torch.Tensor, out: torch.Tensor) -> None:
    """The outputs of a `by_phase` weight, [B, 4 C, T, H + 1, W + 1], to their places in [B, C, T, 2 H, 2 W]."""
    if fast_kernels.usable(phases, out):
        fast_kernels.phases_into(phases, out)
        return
    _, channels, _, height, width = out.shape
    for row in (0, 1):
        for column in (0, 1):
            phase = phases.narrow(1, (2 * row + column) * channels, channels)
            part = phase.narrow(3, row, height // 2).narrow(4, column, width // 2)
            out[:, :, :, row::2, column::2] = part


def add_duplicate(
    main: torch.Tensor, bias: torch.Tensor | None, source: torch.Tensor, dup: Duplicate, first: bool
) -> None:
    """main += bias + the 2.2 shortcut of `source`, in place."""
    if fast_kernels.usable(main, source):
        fast_kernels.add_duplicate(main, bias, source, dup, first)
        return
    total = _wide(main)
    if bias is not None:
        total = total + bias.to(total.dtype).view(1, -1, 1, 1, 1)
    main.copy_(total + duplicate(dup, source, first))


def _sum(main: torch.Tensor, bias: torch.Tensor | None, skip: torch.Tensor | None) -> torch.Tensor:
    if bias is None and skip is None:
        return main
    total = _wide(main)
    if bias is not None:
        total = total + bias.to(total.dtype).view(1, -1, 1, 1, 1)
    if skip is not None:
        total = total + skip
    return total.to(main.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
