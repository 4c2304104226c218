"""The strict operators' glue as Triton kernels over channels-first activations: fewer passes, the same bits.

Every value that torch would round to the activations' dtype is rounded at the same place, division is IEEE, and
multiplications are never fused with additions. One program is a run of positions of one plane (batch, channel, frame).
Planes may lie anywhere, positions of a plane are next to each other in `main` and `skip`, and rows in `out`.
The reduction of a norm stays torch's, so that its order is torch's too; rounding points as in vLLM-Omni's lossless
path (pull request 7056).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wanshim.core.decoding.model.graph import Duplicate

from .optional_triton import libdevice, tl, triton

_BLOCK = 2048
_SIDE = 64  # of a square that is transposed
_EXACT = {"num_warps": 4, "enable_fp_fusion": False}
_EXTENTS = ["C", "T", "n"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def available(x: torch.Tensor) -> bool:
    """Can there be kernels for tensors like `x`?"""
    return libdevice is not None and x.is_cuda and x.dtype in _DTYPES


def planar(x: torch.Tensor) -> bool:
    """Are the positions of each plane of [B, C, T, H, W] next to each other?"""
    return (x.stride(4) == 1 or x.shape[4] == 1) and (x.stride(3) == x.shape[4] or x.shape[3] == 1)


def norm_into(
    x: torch.Tensor, size: torch.Tensor, gamma: torch.Tensor, scale: float, out: torch.Tensor, *, silu: bool
) -> None:
    """out = silu(x / size * scale * gamma + 0), for `size` [B, 1, T, H, W] of any dtype."""
    b, c, t, h, w = x.shape
    if x.numel():
        _norm[_grid(b * c * t, h * w)](
            x, size, gamma, out, C=c, T=t, n=h * w, **_planes("x", x), **_planes("s", size), **_rows(out),
            scale=scale, W=w, SILU=silu, BLOCK=_BLOCK, **_EXACT,
        )  # fmt: skip


def sum_into(main: torch.Tensor, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = (main + bias) + skip."""
    b, c, t, h, w = main.shape
    if main.numel():
        _sum[_grid(b * c * t, h * w)](
            main, main if bias is None else bias, main if skip is None else skip, out, C=c, T=t, n=h * w,
            **_planes("x", main), **_planes("s", main if skip is None else skip), **_rows(out),
            W=w, HAS_BIAS=bias is not None, HAS_SKIP=skip is not None, BLOCK=_BLOCK, **_EXACT,
        )  # fmt: skip


def resize_into(
    main: torch.Tensor, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor, *, pairs: bool
) -> None:
    """out = nearest 2x of (main + bias) + skip; with `pairs` the halves of the channels become two frames."""
    b, c, t, h, w = main.shape
    if main.numel():
        _resize[_grid(b * c * t, 2 * h * 2 * w)](
            main, main if bias is None else bias, main if skip is None else skip, out, C=c, T=t, n=4 * h * w,
            **_planes("x", main), **_planes("s", main if skip is None else skip), **_rows(out),
            W=w, HALVES=2 if pairs else 1, HAS_BIAS=bias is not None, HAS_SKIP=skip is not None, BLOCK=_BLOCK,
            **_EXACT,
        )  # fmt: skip


def add_duplicate(
    main: torch.Tensor, bias: torch.Tensor | None, source: torch.Tensor, dup: Duplicate, first: bool
) -> None:
    """main = (main + bias) + the 2.2 shortcut of `source`, in place."""
    b, c, t, h, w = main.shape
    if main.numel():
        _duplicate[_grid(b * c * t, h * w)](
            main, main if bias is None else bias, source, C=c, T=t, n=h * w, **_planes("x", main),
            **_planes("s", source), W=w, FACTOR_T=dup.factor_t, FACTOR_S=dup.factor_s, REPEATS=dup.repeats,
            LEAD=dup.factor_t - 1 if first else 0, HAS_BIAS=bias is not None, BLOCK=_BLOCK, **_EXACT,
        )  # fmt: skip


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """[B, C, ...] with channels next to each other in memory."""
    out = x.new_empty((x.shape[0], *x.shape[2:], x.shape[1]))
    _transposed(x.contiguous(), x.shape[1], out)
    return out.movedim(-1, 1)


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """[B, C, ...], channels last in memory, with the positions of each channel next to each other."""
    out = x.new_empty(x.shape)
    _transposed(x, x.numel() // max(x.shape[0] * x.shape[1], 1), out)
    return out


def _transposed(x: torch.Tensor, rows: int, out: torch.Tensor) -> None:
    """The memory of `x`, [B, rows, columns], as [B, columns, rows] into that of `out`."""
    if x.numel():
        columns = x.numel() // x.shape[0] // rows
        _transpose[(triton.cdiv(columns, _SIDE) * triton.cdiv(rows, _SIDE), x.shape[0])](
            x, out, rows, columns, SIDE=_SIDE, num_warps=4
        )


def _grid(planes: int, positions: int) -> tuple[int, int]:
    return planes, triton.cdiv(positions, _BLOCK)


def _planes(letter: str, x: torch.Tensor) -> dict[str, int]:
    return {f"{letter}b": x.stride(0), f"{letter}c": x.stride(1), f"{letter}t": x.stride(2)}


def _rows(out: torch.Tensor) -> dict[str, int]:
    return {**_planes("o", out), "oy": out.stride(3)}


if TYPE_CHECKING:  # Triton reads its functions as source; to a type checker their arguments mean nothing
    _norm: Any
    _sum: Any
    _resize: Any
    _duplicate: Any
    _transpose: Any
if not TYPE_CHECKING and triton is not None:

    @triton.jit
    def _plane(C, T, b_stride, c_stride, t_stride):
        """Where this program's plane begins."""
        t = tl.program_id(0) % T
        c = tl.program_id(0) // T % C
        b = tl.program_id(0) // T // C
        return b.to(tl.int64) * b_stride + c.to(tl.int64) * c_stride + t.to(tl.int64) * t_stride

    @triton.jit
    def _total(
        MAIN, BIAS, SKIP, at, mask, C, T, xb, xc, xt, sb, sc, st, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr
    ):
        """(main + bias) + skip at positions `at` of this program's plane, rounded after each sum."""
        dtype = MAIN.dtype.element_ty
        value = tl.load(MAIN + _plane(C, T, xb, xc, xt) + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value = (value + tl.load(BIAS + tl.program_id(0) // T % C).to(tl.float32)).to(dtype).to(tl.float32)
        if HAS_SKIP:
            skip = tl.load(SKIP + _plane(C, T, sb, sc, st) + at, mask=mask, other=0.0).to(tl.float32)
            value = (value + skip).to(dtype).to(tl.float32)
        return value.to(dtype)

    @triton.jit(do_not_specialize=_EXTENTS)
    def _norm(
        X, SIZE, GAMMA, OUT, C, T, n, xb, xc, xt, sb, sc, st, ob, oc, ot, oy, scale,
        W: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        dtype = X.dtype.element_ty
        t = (tl.program_id(0) % T).to(tl.int64)
        b = (tl.program_id(0) // T // C).to(tl.int64)
        value = tl.load(X + _plane(C, T, xb, xc, xt) + at, mask=mask, other=0.0).to(tl.float32)
        size = tl.load(SIZE + b * sb + t * st + at, mask=mask, other=1.0).to(tl.float32)
        gamma = tl.load(GAMMA + tl.program_id(0) // T % C).to(tl.float32)
        value = tl.div_rn(value, size).to(dtype).to(tl.float32)
        value = (value * scale).to(dtype).to(tl.float32)
        value = (value * gamma).to(dtype).to(tl.float32)
        value = (value + 0.0).to(dtype)
        if SILU:
            wide = value.to(tl.float32)
            value = tl.div_rn(wide, 1.0 + libdevice.exp(-wide)).to(dtype)
        tl.store(OUT + _plane(C, T, ob, oc, ot) + (at // W).to(tl.int64) * oy + at % W, value, mask=mask)

    @triton.jit(do_not_specialize=_EXTENTS)
    def _sum(
        MAIN, BIAS, SKIP, OUT, C, T, n, xb, xc, xt, sb, sc, st, ob, oc, ot, oy,
        W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        value = _total(MAIN, BIAS, SKIP, at, mask, C, T, xb, xc, xt, sb, sc, st, HAS_BIAS, HAS_SKIP)
        tl.store(OUT + _plane(C, T, ob, oc, ot) + (at // W).to(tl.int64) * oy + at % W, value, mask=mask)

    @triton.jit(do_not_specialize=_EXTENTS)
    def _resize(
        MAIN, BIAS, SKIP, OUT, C, T, n, xb, xc, xt, sb, sc, st, ob, oc, ot, oy,
        W: tl.constexpr, HALVES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        large = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = large < n
        y, x = large // (2 * W), large % (2 * W)
        value = _total(MAIN, BIAS, SKIP, y // 2 * W + x // 2, mask, C, T, xb, xc, xt, sb, sc, st, HAS_BIAS, HAS_SKIP)
        t = tl.program_id(0) % T
        c = tl.program_id(0) // T % C
        b = tl.program_id(0) // T // C
        frame = t * HALVES + c // (C // HALVES)
        plane = b.to(tl.int64) * ob + (c % (C // HALVES)).to(tl.int64) * oc + frame.to(tl.int64) * ot
        tl.store(OUT + plane + y.to(tl.int64) * oy + x, value, mask=mask)

    @triton.jit(do_not_specialize=_EXTENTS)
    def _duplicate(
        MAIN, BIAS, SOURCE, C, T, n, xb, xc, xt, sb, sc, st,
        W: tl.constexpr, FACTOR_T: tl.constexpr, FACTOR_S: tl.constexpr, REPEATS: tl.constexpr, LEAD: tl.constexpr,
        HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        y, x = at // W, at % W
        dtype = MAIN.dtype.element_ty
        value = _total(MAIN, BIAS, MAIN, at, mask, C, T, xb, xc, xt, xb, xc, xt, HAS_BIAS, False).to(tl.float32)
        t = tl.program_id(0) % T + LEAD
        c = tl.program_id(0) // T % C
        b = tl.program_id(0) // T // C
        offset = (t % FACTOR_T * FACTOR_S + y % FACTOR_S) * FACTOR_S + x % FACTOR_S
        channel = (c * (FACTOR_T * FACTOR_S * FACTOR_S) + offset) // REPEATS
        place = b.to(tl.int64) * sb + (t // FACTOR_T).to(tl.int64) * st + channel.to(tl.int64) * sc
        place += y // FACTOR_S * (W // FACTOR_S) + x // FACTOR_S
        value += tl.load(SOURCE + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(MAIN + _plane(C, T, xb, xc, xt) + at, value.to(dtype), mask=mask)

    @triton.jit
    def _transpose(X, OUT, rows, columns, SIDE: tl.constexpr):
        across = tl.cdiv(columns, SIDE)
        row = (tl.program_id(0) // across * SIDE + tl.arange(0, SIDE)).to(tl.int64)
        column = (tl.program_id(0) % across * SIDE + tl.arange(0, SIDE)).to(tl.int64)
        start = tl.program_id(1).to(tl.int64) * rows * columns
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(X + start + row[:, None] * columns + column[None, :], mask=mask)
        tl.store(OUT + start + column[:, None] * rows + row[None, :], tl.trans(value), mask=tl.trans(mask))
