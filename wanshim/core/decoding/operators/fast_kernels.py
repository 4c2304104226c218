"""The glue as Triton kernels over channels-last activations: each value is read once and written once.

One row of a kernel is one position (batch, frame, row, column) with all its channels next to each other in memory, so
the norm over channels is a reduction inside a program. Tensors may be windows into larger ones: all four outer strides
are passed. Without Triton, or off CUDA, `usable` says no and `fused.py` computes the same in torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wanshim.core.decoding.model.graph import Norm, Shortcut
from wanshim.core.shared.kernel_launch import launch, takes_kernels
from wanshim.core.shared.optional_triton import tl, triton

from .layout import used_strides
from .winograd import UNIT, Products

_TILE = 4096  # elements per program: enough bytes in flight to approach the memory's bandwidth
_TILE_OF_PRODUCTS, _WARPS_OF_PRODUCTS = 512, 2  # six loads and four rows to write need more registers
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Extents change with every chunk and rank and gain nothing from a compilation of their own; strides do.
_EXTENTS = ["T", "H", "W"]
# Where one is absent, its loads or stores are masked: a kernel for each case takes longer to compile than this costs.
_PRESENT = ["bias", "skip", "kept"]


def usable(*given: torch.Tensor | Products | None) -> bool:
    """Can the kernels take these tensors: CUDA, a supported dtype, channels next to each other."""
    tensors = [x.parts[0] if isinstance(x, Products) else x for x in given if x is not None]
    return triton is not None and all(takes_kernels(x) and x.dtype in _DTYPES and x.stride(1) == 1 for x in tensors)


def add_duplicate(
    main: torch.Tensor, bias: torch.Tensor | None, source: torch.Tensor, dup: Shortcut, first: bool, out: torch.Tensor
) -> None:
    _, c, t, h, w = out.shape
    block_c, block_p, programs = _blocks(c, out.shape)
    launch(
        _duplicate, (programs,),
        main, main if bias is None else bias, source, out, t, h, w, *_outer(main), *_outer(source), *_outer(out),
        PHASES=main.shape[1] != c, C=c, BLOCK_C=block_c, BLOCK_P=block_p, FACTOR_T=dup.factor_t, FACTOR_S=dup.factor_s,
        REPEATS=dup.group, LEAD=dup.factor_t - 1 if first else 0, HAS_BIAS=bias is not None,
    )  # fmt: skip


def sum_into(
    main: torch.Tensor | Products,
    bias: torch.Tensor | None,
    skip: torch.Tensor | None,
    out: torch.Tensor,
    norm: Norm | None = None,
    *,
    silu: bool = False,
    kept: torch.Tensor | None = None,
) -> None:
    """The sum, through the norm and SiLU if they are given; see `fused.norm_into`."""
    _, c, t, h, w = out.shape
    first = main.parts[0] if isinstance(main, Products) else main
    rows = first.shape if isinstance(main, Products) else out.shape
    block_c, block_p, programs = _blocks(c, rows, _TILE_OF_PRODUCTS if isinstance(main, Products) else _TILE)
    if programs == 0:
        return
    gamma, shift = (None, None) if norm is None else (norm.gamma, norm.bias)
    # `out` stands for what is absent, so that the types of the arguments stay the same.
    values = [out if each is None else each for each in (bias, skip, gamma, shift, out, kept)]
    strides = (
        *_outer(first), *_outer(values[1]), *_outer(out), *_outer(values[-1]),
        0.0 if norm is None else norm.scale, 0.0 if norm is None else norm.eps,
    )  # fmt: skip
    present = [int(each is not None) for each in (bias, skip, kept)]
    fixed = {
        "C": c, "BLOCK_C": block_c, "BLOCK_P": block_p,
        "HAS_SHIFT": shift is not None, "NORM": norm is not None, "SILU": silu,
    }  # fmt: skip
    if isinstance(main, Products):
        sizes, options = (t, UNIT, rows[2], h, w), {"num_warps": _WARPS_OF_PRODUCTS, **fixed}
        launch(_sum_of_products, (programs,), *main.parts, *values, *sizes, *strides, *present, **options)
    else:
        fixed["PHASES"] = main.shape[1] != c
        launch(_sum, (programs,), main, *values, t, h, w, *strides, *present, **fixed)


def _outer(x: torch.Tensor) -> tuple[int, ...]:
    batch, _, *others = used_strides(x)
    return (batch, *others)


def _blocks(channels: int, shape: torch.Size, tile: int = _TILE) -> tuple[int, int, int]:
    """Channels and positions of a program, all in one row, and how many programs a tensor of `shape` takes."""
    b, _, t, h, w = shape
    block_c = triton.next_power_of_2(channels)
    block_p = max(1, min(tile // block_c, triton.next_power_of_2(w)))
    return block_c, block_p, b * t * h * triton.cdiv(w, block_p)


if TYPE_CHECKING:  # Triton reads its functions as source; to a type checker their arguments mean nothing
    _sum: Any
    _sum_of_products: Any
    _duplicate: Any
if not TYPE_CHECKING and triton is not None:

    @triton.jit
    def _row(program, T, H, W, BLOCK_P: tl.constexpr):
        """Which positions of a [B, T, H, W] grid a program has: batch, frame, row, and its columns."""
        columns = tl.cdiv(W, BLOCK_P)
        row = program // columns
        x = (program % columns) * BLOCK_P + tl.arange(0, BLOCK_P)
        return row // H // T, (row // H) % T, row % H, x

    @triton.jit
    def _place(b, t, y, x, sb, st, sy, sx):
        """Addresses of these positions in memory."""
        return b.to(tl.int64) * sb + t.to(tl.int64) * st + y.to(tl.int64) * sy + x * sx

    @triton.jit
    def _values(b, t, y, x, sb, st, sy, sx, c, C: tl.constexpr, PHASES: tl.constexpr):
        """Addresses of all channels of these positions; by phase they are those of a position of a smaller grid."""
        if PHASES:
            channel = (2 * (y % 2) + x % 2)[:, None] * C + c[None, :]
            return _place(b, t, (y + 1) // 2, (x + 1) // 2, sb, st, sy, sx)[:, None] + channel
        return _place(b, t, y, x, sb, st, sy, sx)[:, None] + c[None, :]

    @triton.jit
    def _finish(
        value, b, t, y, x, mask, c, BIAS, SKIP, GAMMA, SHIFT, OUT, KEPT,
        sb, st, sy, sx, ob, ot, oy, ox, kb, kt, ky, kx, scale, eps, bias, skip, kept,
        C: tl.constexpr, HAS_SHIFT: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr,
    ):  # fmt: skip
        """From the output of a convolution at these positions to `OUT`."""
        dtype = OUT.dtype.element_ty
        value += tl.load(BIAS + c, mask=c < tl.where(bias != 0, C, 0), other=0.0).to(tl.float32)[None, :]
        at = SKIP + _place(b, t, y, x, sb, st, sy, sx)[:, None] + c[None, :]
        value += tl.load(at, mask=mask & (c < tl.where(skip != 0, C, 0))[None, :], other=0.0).to(tl.float32)
        at = KEPT + _place(b, t, y, x, kb, kt, ky, kx)[:, None] + c[None, :]
        tl.store(at, value.to(dtype), mask=mask & (c < tl.where(kept != 0, C, 0))[None, :])
        if NORM:
            length = tl.maximum(tl.sqrt(tl.sum(value * value, axis=1)), eps)
            gamma = tl.load(GAMMA + c, mask=c < C, other=0.0).to(tl.float32) * scale
            value = value * (1.0 / length)[:, None] * gamma[None, :]
            if HAS_SHIFT:
                value += tl.load(SHIFT + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        if SILU:
            root = tl.rsqrt(1.0 + tl.exp(-value))  # a division takes longer than the memory
            value = value * root * root
        out = OUT + _place(b, t, y, x, ob, ot, oy, ox)[:, None] + c[None, :]
        tl.store(out, value.to(dtype), mask=mask)

    @triton.jit(do_not_specialize=[*_EXTENTS, *_PRESENT])
    def _sum(
        MAIN, BIAS, SKIP, GAMMA, SHIFT, OUT, KEPT, T, H, W,
        mb, mt, my, mx, sb, st, sy, sx, ob, ot, oy, ox, kb, kt, ky, kx, scale, eps, bias, skip, kept,
        C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
        HAS_SHIFT: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, PHASES: tl.constexpr,
    ):  # fmt: skip
        b, t, y, x = _row(tl.program_id(0), T, H, W, BLOCK_P)
        c = tl.arange(0, BLOCK_C)
        mask = (x < W)[:, None] & (c < C)[None, :]
        main = MAIN + _values(b, t, y, x, mb, mt, my, mx, c, C, PHASES)
        value = tl.load(main, mask=mask, other=0.0).to(tl.float32)
        _finish(
            value, b, t, y, x, mask, c, BIAS, SKIP, GAMMA, SHIFT, OUT, KEPT,
            sb, st, sy, sx, ob, ot, oy, ox, kb, kt, ky, kx, scale, eps,
            bias, skip, kept, C, HAS_SHIFT, NORM, SILU,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["frames", *_EXTENTS, *_PRESENT])
    def _sum_of_products(
        M0, M1, M2, M3, M4, M5, BIAS, SKIP, GAMMA, SHIFT, OUT, KEPT, frames, unit, T, H, W,
        mb, mt, my, mx, sb, st, sy, sx, ob, ot, oy, ox, kb, kt, ky, kx, scale, eps, bias, skip, kept,
        C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
        HAS_SHIFT: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr,
    ):  # fmt: skip
        b, group, y, x = _row(tl.program_id(0), T, H, W, BLOCK_P)
        c = tl.arange(0, BLOCK_C)
        mask = (x < W)[:, None] & (c < C)[None, :]
        at = _place(b, group, y, x, mb, mt, my, mx)[:, None] + c[None, :]
        m1 = tl.load(M1 + at, mask=mask, other=0.0).to(tl.float32)
        m2 = tl.load(M2 + at, mask=mask, other=0.0).to(tl.float32)
        m3 = tl.load(M3 + at, mask=mask, other=0.0).to(tl.float32)
        m4 = tl.load(M4 + at, mask=mask, other=0.0).to(tl.float32)
        both, apart = 2.0 * (m1 + m2), 2.0 * (m1 - m2)
        m0 = tl.load(M0 + at, mask=mask, other=0.0).to(tl.float32)
        _finish(
            unit * (4.0 * m0 + both + 4.0 * m3 + 0.5 * m4), b, 4 * group, y, x, mask, c,
            BIAS, SKIP, GAMMA, SHIFT, OUT, KEPT, sb, st, sy, sx, ob, ot, oy, ox, kb, kt, ky, kx, scale, eps,
            bias, skip, kept, C, HAS_SHIFT, NORM, SILU,
        )  # fmt: skip
        mask = (x < tl.where(4 * group + 1 < frames, W, 0))[:, None] & (c < C)[None, :]
        _finish(
            unit * (apart + 2.0 * m3 - m4), b, 4 * group + 1, y, x, mask, c,
            BIAS, SKIP, GAMMA, SHIFT, OUT, KEPT, sb, st, sy, sx, ob, ot, oy, ox, kb, kt, ky, kx, scale, eps,
            bias, skip, kept, C, HAS_SHIFT, NORM, SILU,
        )  # fmt: skip
        mask = (x < tl.where(4 * group + 2 < frames, W, 0))[:, None] & (c < C)[None, :]
        _finish(
            unit * (both + m3 + 2.0 * m4), b, 4 * group + 2, y, x, mask, c,
            BIAS, SKIP, GAMMA, SHIFT, OUT, KEPT, sb, st, sy, sx, ob, ot, oy, ox, kb, kt, ky, kx, scale, eps,
            bias, skip, kept, C, HAS_SHIFT, NORM, SILU,
        )  # fmt: skip
        mask = (x < tl.where(4 * group + 3 < frames, W, 0))[:, None] & (c < C)[None, :]
        m5 = tl.load(M5 + at, mask=mask, other=0.0).to(tl.float32)
        _finish(
            unit * (apart + 0.5 * m3 - 4.0 * m4 + 4.0 * m5), b, 4 * group + 3, y, x, mask, c,
            BIAS, SKIP, GAMMA, SHIFT, OUT, KEPT, sb, st, sy, sx, ob, ot, oy, ox, kb, kt, ky, kx, scale, eps,
            bias, skip, kept, C, HAS_SHIFT, NORM, SILU,
        )  # fmt: skip

    @triton.jit(do_not_specialize=_EXTENTS)
    def _duplicate(
        MAIN, BIAS, SOURCE, OUT, T, H, W, mb, mt, my, mx, sb, st, sy, sx, ob, ot, oy, ox, PHASES: tl.constexpr,
        C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
        FACTOR_T: tl.constexpr, FACTOR_S: tl.constexpr, REPEATS: tl.constexpr, LEAD: tl.constexpr,
        HAS_BIAS: tl.constexpr,
    ):  # fmt: skip
        b, frame, y, x = _row(tl.program_id(0), T, H, W, BLOCK_P)
        c = tl.arange(0, BLOCK_C)
        mask = (x < W)[:, None] & (c < C)[None, :]
        t = frame + LEAD
        offset = ((t % FACTOR_T) * FACTOR_S + y % FACTOR_S) * FACTOR_S + x % FACTOR_S
        channel = (c[None, :] * (FACTOR_T * FACTOR_S * FACTOR_S) + offset[:, None]) // REPEATS
        place = _place(b, t // FACTOR_T, y // FACTOR_S, x // FACTOR_S, sb, st, sy, sx)
        source = tl.load(SOURCE + place[:, None] + channel, mask=mask, other=0.0).to(tl.float32)
        main = MAIN + _values(b, frame, y, x, mb, mt, my, mx, c, C, PHASES)
        value = tl.load(main, mask=mask, other=0.0).to(tl.float32) + source
        if HAS_BIAS:
            value += tl.load(BIAS + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        out = OUT + _place(b, frame, y, x, ob, ot, oy, ox)[:, None] + c[None, :]
        tl.store(out, value.to(OUT.dtype.element_ty), mask=mask)
