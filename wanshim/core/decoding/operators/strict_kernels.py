"""The strict operators' glue as Triton kernels: fewer passes, the same bits, whatever the memory layout.

Every value that torch would round to the activations' dtype is rounded at the same place, quotients are IEEE's, and
multiplications are never fused with additions. An IEEE division takes longer than the memory; two Newton steps from a
reciprocal round the same (P. Markstein, IBM J. Res. Dev. 34 (1), 1990). One program is a square of channels and
positions of one frame, so that a tensor may be read channels first and written channels last at the memory's
bandwidth: what a convolution leaves channels last becomes a channels-first sum, and a norm writes its values where the
next convolution reads them. The reduction of a norm stays torch's, so that its order is torch's too; rounding points as
in vLLM-Omni's lossless path (pull request 7056).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wanshim.core.decoding.model.graph import Shortcut
from wanshim.core.shared.kernel_launch import launch, takes_kernels
from wanshim.core.shared.optional_triton import libdevice, tl, triton

from .layout import dense, used_strides

_SIDE = 64  # of a square
_EXACT = {"num_warps": 4, "enable_fp_fusion": False, "SIDE": _SIDE}
_NEAR = tl.constexpr(2.0**60) if tl is not None else 0  # the largest value whose quotients and remainders are exact
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def available(x: torch.Tensor) -> bool:
    """Can there be kernels for tensors like `x`?"""
    return libdevice is not None and takes_kernels(x) and x.dtype in _DTYPES


def planar(x: torch.Tensor) -> bool:
    """Are the positions of each plane of [B, C, T, H, W] next to each other?"""
    return (x.stride(4) == 1 or x.shape[4] == 1) and (x.stride(3) == x.shape[4] or x.shape[3] == 1)


def norm_into(
    x: torch.Tensor, size: torch.Tensor, gamma: torch.Tensor, scale: float, out: torch.Tensor, *, silu: bool
) -> None:
    """out = silu(x / size * scale * gamma + 0), for `size` [B, 1, T, H, W] of any dtype."""
    if x.numel():
        launch(
            _norm, _grid(x, 1), x, size, gamma, out,
            **_extents(x, 1), **_strides("x", x), **_strides("s", size), **_strides("o", out),
            scale=scale, SILU=silu, **_EXACT,
        )  # fmt: skip


def sum_into(main: torch.Tensor, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = (main + bias) + skip; `out` may be `main`."""
    if main.numel():
        launch(
            _sum, _grid(main, 1),
            main, main if bias is None else bias, main if skip is None else skip, out, **_extents(main, 1),
            **_strides("x", main), **_strides("s", main if skip is None else skip), **_strides("o", out),
            HAS_BIAS=bias is not None, HAS_SKIP=skip is not None, **_EXACT,
        )  # fmt: skip


def resize_into(
    main: torch.Tensor, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor, *, pairs: bool
) -> None:
    """out = nearest 2x of (main + bias) + skip; with `pairs` the halves of the channels become two frames."""
    if main.numel():
        launch(
            _resize, _grid(main, 4),
            main, main if bias is None else bias, main if skip is None else skip, out, **_extents(main, 4),
            **_strides("x", main), **_strides("s", main if skip is None else skip), **_strides("o", out),
            HALVES=2 if pairs else 1, HAS_BIAS=bias is not None, HAS_SKIP=skip is not None, **_EXACT,
        )  # fmt: skip


def add_duplicate(
    main: torch.Tensor,
    bias: torch.Tensor | None,
    source: torch.Tensor,
    dup: Shortcut,
    first: bool,
    out: torch.Tensor,
) -> None:
    """out = (main + bias) + the 2.2 shortcut of `source`; `out` may be `main`."""
    if main.numel():
        launch(
            _duplicate, _grid(main, 1),
            main, main if bias is None else bias, source, out, **_extents(main, 1),
            **_strides("x", main), **_strides("s", source), **_strides("o", out),
            FACTOR_T=dup.factor_t, FACTOR_S=dup.factor_s, REPEATS=dup.group,
            LEAD=dup.factor_t - 1 if first else 0, HAS_BIAS=bias is not None, **_EXACT,
        )  # fmt: skip


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """[B, C, ...] with channels next to each other in memory."""
    if x.movedim(1, -1).is_contiguous():
        return x
    if x.dim() == 5 and not x.is_contiguous():
        out = dense(tuple(x.shape), x)
        sum_into(x, None, None, out)
        return out
    out = x.new_empty((x.shape[0], *x.shape[2:], x.shape[1]))
    x = x.contiguous()
    if x.numel():
        rows = x.shape[1]
        columns = x.numel() // x.shape[0] // rows
        grid = (triton.cdiv(columns, _SIDE) * triton.cdiv(rows, _SIDE), x.shape[0])
        launch(_transpose, grid, x, out, rows, columns, SIDE=_SIDE, num_warps=4)
    return out.movedim(-1, 1)


def _grid(x: torch.Tensor, scale: int) -> tuple[int]:
    """The squares of a [B, C, T, H, W] like `x` with `scale` times as many positions."""
    b, c, t, h, w = x.shape
    return (b * t * triton.cdiv(c, _SIDE) * triton.cdiv(scale * h * w, _SIDE),)


def _extents(x: torch.Tensor, scale: int) -> dict[str, int]:
    return {"C": x.shape[1], "T": x.shape[2], "n": scale * x.shape[3] * x.shape[4], "W": x.shape[4]}


def _strides(letter: str, x: torch.Tensor) -> dict[str, int]:
    return {letter + dim: stride for dim, stride in zip("bctyx", used_strides(x))}


if TYPE_CHECKING:  # Triton reads its functions as source; to a type checker their arguments mean nothing
    _norm: Any
    _sum: Any
    _resize: Any
    _duplicate: Any
    _transpose: Any
if not TYPE_CHECKING and triton is not None:

    @triton.jit
    def _square(C, T, n, SIDE: tl.constexpr):
        """Batch, channels, frame and positions of this program."""
        across, channels = tl.cdiv(n, SIDE), tl.cdiv(C, SIDE)
        at = tl.program_id(0) % across * SIDE + tl.arange(0, SIDE)
        rest = tl.program_id(0) // across
        c = rest % channels * SIDE + tl.arange(0, SIDE)
        return rest // channels // T, c, rest // channels % T, at

    @triton.jit
    def _place(b, c, t, y, x, sb, sc, st, sy, sx):
        """Addresses of these channels of these positions in memory."""
        frame = b.to(tl.int64) * sb + t.to(tl.int64) * st
        return frame + (c.to(tl.int64) * sc)[:, None] + (y.to(tl.int64) * sy + x * sx)[None, :]

    @triton.jit
    def _total(
        MAIN, BIAS, SKIP, mask, C, b, c, t, y, x, xb, xc, xt, xy, xx, sb, sc, st, sy, sx,
        HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr,
    ):  # fmt: skip
        """(main + bias) + skip, rounded after each sum."""
        dtype = MAIN.dtype.element_ty
        value = tl.load(MAIN + _place(b, c, t, y, x, xb, xc, xt, xy, xx), mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(BIAS + c, mask=c < C, other=0.0).to(tl.float32)
            value = (value + bias[:, None]).to(dtype).to(tl.float32)
        if HAS_SKIP:
            skip = tl.load(SKIP + _place(b, c, t, y, x, sb, sc, st, sy, sx), mask=mask, other=0.0).to(tl.float32)
            value = (value + skip).to(dtype).to(tl.float32)
        return value.to(dtype)

    @triton.jit
    def _divided(value, size, SIDE: tl.constexpr):
        """value / size (of each position), as `div_rn` rounds; in less time where no step can over- or underflow."""
        largest = tl.maximum(tl.max(tl.abs(value)), tl.max(size))
        least = tl.minimum(tl.min(tl.where(value == 0.0, 1.0, tl.abs(value))), tl.min(size))
        sizes = tl.broadcast_to(size[None, :], (SIDE, SIDE))
        if (largest < _NEAR) & (least > 1.0 / _NEAR):
            inverse = tl.broadcast_to(tl.div_rn(1.0, size)[None, :], (SIDE, SIDE))
            quotient = value * inverse
            quotient = tl.fma(tl.fma(-quotient, sizes, value), inverse, quotient)
            quotient = tl.fma(tl.fma(-quotient, sizes, value), inverse, quotient)
        else:
            quotient = tl.div_rn(value, sizes)
        return quotient

    @triton.jit
    def _silu(x):
        """x / (1 + exp(-x)) for 16-bit values, of which `strict_checks` compares all with torch's."""
        size = 1.0 + libdevice.exp(-x)
        root = tl.rsqrt(size)
        inverse = root * root
        quotient = x * inverse
        rest = tl.fma(-quotient, size, x)
        better = tl.fma(rest, inverse, quotient)
        return tl.where(rest == rest, better, quotient)  # not a number: of something infinite

    @triton.jit(do_not_specialize=["T"])
    def _norm(
        X, SIZE, GAMMA, OUT, C, T, n, W, xb, xc, xt, xy, xx, sb, sc, st, sy, sx, ob, oc, ot, oy, ox, scale,
        SILU: tl.constexpr, SIDE: tl.constexpr,
    ):  # fmt: skip
        b, c, t, at = _square(C, T, n, SIDE)
        mask = (c < C)[:, None] & (at < n)[None, :]
        y, x = at // W, at % W
        dtype = X.dtype.element_ty
        value = tl.load(X + _place(b, c, t, y, x, xb, xc, xt, xy, xx), mask=mask, other=0.0).to(tl.float32)
        place = b.to(tl.int64) * sb + t.to(tl.int64) * st + y.to(tl.int64) * sy + x * sx
        size = tl.load(SIZE + place, mask=at < n, other=1.0).to(tl.float32)
        gamma = tl.load(GAMMA + c, mask=c < C, other=0.0).to(tl.float32)
        value = _divided(value, size, SIDE).to(dtype).to(tl.float32)
        value = (value * scale).to(dtype).to(tl.float32)
        value = (value * gamma[:, None]).to(dtype).to(tl.float32)
        value = (value + 0.0).to(dtype)
        if SILU:
            value = _silu(value.to(tl.float32)).to(dtype)
        tl.store(OUT + _place(b, c, t, y, x, ob, oc, ot, oy, ox), value, mask=mask)

    @triton.jit(do_not_specialize=["T"])
    def _sum(
        MAIN, BIAS, SKIP, OUT, C, T, n, W, xb, xc, xt, xy, xx, sb, sc, st, sy, sx, ob, oc, ot, oy, ox,
        HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, SIDE: tl.constexpr,
    ):  # fmt: skip
        b, c, t, at = _square(C, T, n, SIDE)
        mask = (c < C)[:, None] & (at < n)[None, :]
        y, x = at // W, at % W
        value = _total(
            MAIN, BIAS, SKIP, mask, C, b, c, t, y, x, xb, xc, xt, xy, xx, sb, sc, st, sy, sx, HAS_BIAS, HAS_SKIP
        )
        tl.store(OUT + _place(b, c, t, y, x, ob, oc, ot, oy, ox), value, mask=mask)

    @triton.jit(do_not_specialize=["T"])
    def _resize(
        MAIN, BIAS, SKIP, OUT, C, T, n, W, xb, xc, xt, xy, xx, sb, sc, st, sy, sx, ob, oc, ot, oy, ox,
        HALVES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, SIDE: tl.constexpr,
    ):  # fmt: skip
        b, c, t, at = _square(C, T, n, SIDE)
        mask = (c < C)[:, None] & (at < n)[None, :]
        y, x = at // (2 * W), at % (2 * W)
        value = _total(
            MAIN, BIAS, SKIP, mask, C, b, c, t, y // 2, x // 2,
            xb, xc, xt, xy, xx, sb, sc, st, sy, sx, HAS_BIAS, HAS_SKIP,
        )  # fmt: skip
        half = C // HALVES
        channel = (c % half).to(tl.int64) * oc + (c // half).to(tl.int64) * ot  # the second half is the frame after
        frame = b.to(tl.int64) * ob + (t * HALVES).to(tl.int64) * ot
        place = frame + channel[:, None] + (y.to(tl.int64) * oy + x * ox)[None, :]
        tl.store(OUT + place, value, mask=mask)

    @triton.jit(do_not_specialize=["T"])
    def _duplicate(
        MAIN, BIAS, SOURCE, OUT, C, T, n, W, xb, xc, xt, xy, xx, sb, sc, st, sy, sx, ob, oc, ot, oy, ox,
        FACTOR_T: tl.constexpr, FACTOR_S: tl.constexpr, REPEATS: tl.constexpr, LEAD: tl.constexpr,
        HAS_BIAS: tl.constexpr, SIDE: tl.constexpr,
    ):  # fmt: skip
        b, c, t, at = _square(C, T, n, SIDE)
        mask = (c < C)[:, None] & (at < n)[None, :]
        y, x = at // W, at % W
        dtype = MAIN.dtype.element_ty
        value = _total(
            MAIN, BIAS, MAIN, mask, C, b, c, t, y, x, xb, xc, xt, xy, xx, xb, xc, xt, xy, xx, HAS_BIAS, False
        ).to(tl.float32)
        frame = t + LEAD
        offset = (frame % FACTOR_T * FACTOR_S + y % FACTOR_S) * FACTOR_S + x % FACTOR_S
        channel = ((c * (FACTOR_T * FACTOR_S * FACTOR_S))[:, None] + offset[None, :]) // REPEATS
        start = b.to(tl.int64) * sb + (frame // FACTOR_T).to(tl.int64) * st
        place = (y // FACTOR_S).to(tl.int64) * sy + x // FACTOR_S * sx
        place = start + channel.to(tl.int64) * sc + place[None, :]
        value += tl.load(SOURCE + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(OUT + _place(b, c, t, y, x, ob, oc, ot, oy, ox), value.to(dtype), mask=mask)

    @triton.jit
    def _transpose(X, OUT, rows, columns, SIDE: tl.constexpr):
        across = tl.cdiv(columns, SIDE)
        row = (tl.program_id(0) // across * SIDE + tl.arange(0, SIDE)).to(tl.int64)
        column = (tl.program_id(0) % across * SIDE + tl.arange(0, SIDE)).to(tl.int64)
        start = tl.program_id(1).to(tl.int64) * rows * columns
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(X + start + row[:, None] * columns + column[None, :], mask=mask)
        tl.store(OUT + start + column[:, None] * rows + row[None, :], tl.trans(value), mask=tl.trans(mask))
