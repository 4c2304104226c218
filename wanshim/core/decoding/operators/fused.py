"""Everything between two convolutions in one pass: bias, residual, norm, SiLU, order of frames, duplication.

Each function writes into a given tensor, and takes `main` by phase (`window.Pending`) too, or as the products of a
convolution by Winograd's method. On CUDA with Triton it is one kernel (`fast_kernels.py`); elsewhere the same
arithmetic in torch: sums and norms in fp32 (or fp64), one rounding at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from wanshim.core.decoding.model.graph import Norm, Shortcut

from . import fast_kernels
from .layout import duplicate, wide
from .winograd import Products


def sum_into(
    main: torch.Tensor | Products, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out = main + bias + skip."""
    if fast_kernels.usable(main, skip, out):
        fast_kernels.sum_into(main, bias, skip, out)
        return
    out.copy_(_sum(main, bias, skip, out))


def norm_into(
    main: torch.Tensor | Products,
    bias: torch.Tensor | None,
    skip: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor,
    *,
    silu: bool,
    kept: torch.Tensor | None,
) -> None:
    """out = silu(norm(main + bias + skip)); the sum goes to `kept`, which may be `main` or `skip`, for the residual."""
    if fast_kernels.usable(main, skip, out, kept):
        fast_kernels.sum_into(main, bias, skip, out, norm, silu=silu, kept=kept)
        return
    total = _sum(main, bias, skip, out)
    value = wide(total)
    value = value / torch.linalg.vector_norm(value, dim=1, keepdim=True).clamp_min(norm.eps)
    value = value * (norm.gamma.to(value.dtype) * norm.scale).view(1, -1, 1, 1, 1)
    if norm.bias is not None:
        value = value + norm.bias.to(value.dtype).view(1, -1, 1, 1, 1)
    out.copy_(F.silu(value) if silu else value)
    if kept is not None:
        kept.copy_(total)


def interleave_into(
    main: torch.Tensor, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out = main + bias + skip; the halves of the channels become the even and the odd frames."""
    biases = (None, None) if bias is None else bias.chunk(2)
    skips = (None, None) if skip is None else skip.chunk(2, 1)
    for half, part in enumerate(main.chunk(2, 1)):
        sum_into(part, biases[half], skips[half], out[:, :, half::2])


def add_duplicate(
    main: torch.Tensor, bias: torch.Tensor | None, source: torch.Tensor, dup: Shortcut, first: bool, out: torch.Tensor
) -> None:
    """out = main + bias + the 2.2 shortcut of `source`; `out` may be `main`."""
    if fast_kernels.usable(main, source, out):
        fast_kernels.add_duplicate(main, bias, source, dup, first, out)
        return
    total = wide(_from_phases(main, out))
    if bias is not None:
        total = total + bias.to(total.dtype).view(1, -1, 1, 1, 1)
    out.copy_(total + duplicate(dup, source, first))


def _sum(
    main: torch.Tensor | Products, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """main + bias + skip in the shape and the dtype of `out`."""
    value = main.joined() if isinstance(main, Products) else _from_phases(main, out)
    if bias is None and skip is None:
        return value.to(out.dtype)
    total = wide(value)
    if bias is not None:
        total = total + bias.to(total.dtype).view(1, -1, 1, 1, 1)
    if skip is not None:
        total = total + skip
    return total.to(out.dtype)


def _from_phases(main: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`main` as `out` has its values, if it comes by phase."""
    _, channels, _, height, width = out.shape
    if main.shape[1] == channels:
        return main
    large = torch.empty_like(out)
    for row in (0, 1):
        for column in (0, 1):
            phase = main.narrow(1, (2 * row + column) * channels, channels)
            large[:, :, :, row::2, column::2] = phase.narrow(3, row, height // 2).narrow(4, column, width // 2)
    return large
