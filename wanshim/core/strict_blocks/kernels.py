"""Triton kernels of the pointwise steps between a block's matrix products and attentions.

Each reads its tensors once and rounds where the framework's separate steps round, without fused multiply-add where the
framework has none. Statistics of a norm come from torch's own reductions, so that their order is torch's. Each program
computes BLOCK values of one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wanshim.core.shared.kernel_launch import launch
from wanshim.core.shared.optional_triton import tl, triton

_DTYPES = (torch.bfloat16, torch.float16)
_BLOCK = 1024
_EXACT = {"BLOCK": _BLOCK, "num_warps": 4, "enable_fp_fusion": False}


def available(x: torch.Tensor) -> bool:
    """Whether there are kernels for tensors like `x`."""
    return triton is not None and x.is_cuda and x.dtype in _DTYPES


def normalized(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float, affine: bool) -> torch.Tensor:
    """The layer norm of `x` in fp32, then modulated, then rounded to the dtype of `x`.

    Args:
        x: (batch, tokens, channels).
        scale: (batch or 1, tokens or 1, channels). The norm is multiplied by 1 + scale; with `affine` by scale.
        shift: of the same sizes, is added.
    """
    channels = x.shape[-1]
    _, mean, rstd = torch.native_layer_norm(x, (channels,), None, None, eps)
    out = torch.empty_like(x)
    launch(
        _normalize, _grid(x), x, mean, rstd, scale, shift, out, x.shape[1], channels,
        *_strides(scale, x), *_strides(shift, x), AFFINE=affine, **_EXACT,
    )  # fmt: skip
    return out


def modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x * (1 + scale) + shift, each step rounded to the one dtype of all three. Sizes as of `normalized`."""
    out = torch.empty_like(x)
    launch(
        _modulate, _grid(x), x, scale, shift, out, x.shape[1], x.shape[2],
        *_strides(scale, x), *_strides(shift, x), **_EXACT,
    )  # fmt: skip
    return out


def gated(x: torch.Tensor, gate: torch.Tensor, update: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """x + gate * update, rounded to the dtype of `x`.

    Args:
        gate: (batch or 1, tokens or 1, channels).
        update: (batch, tokens, channels).
        wide: the product is not rounded before the sum.
    """
    out = torch.empty_like(x)
    launch(
        _gate, _grid(x), x, update, gate, out, x.shape[1], x.shape[2], *_strides(gate, x), WIDE=wide, **_EXACT
    )  # fmt: skip
    return out


def rotated(x: torch.Tensor, *angles: torch.Tensor, head: int) -> torch.Tensor:
    """Neighbouring channels of a head turned as pairs, in the dtype of the angles, rounded to that of `x`.

    Method: RoFormer (Su et al. 2021, arXiv:2104.09864).

    Args:
        x: (batch, tokens, heads * head), contiguous.
        angles: cosine and sine, contiguous, each with `head` values for each token, of which those of even places are
            read of the cosine, those of odd places of the sine; or one complex tensor, contiguous, with `head // 2`
            values for each token, by which the pairs are multiplied as torch multiplies complex numbers on CUDA.
        head: channels of a head.
    """
    out = torch.empty_like(x)
    tokens, channels = x.shape[1:]
    is_complex = len(angles) == 1
    cosine, sine = [torch.view_as_real(angles[0])] * 2 if is_complex else angles
    launch(_rotate, _grid(x), x, cosine, sine, out, tokens, channels, FUSED=is_complex, HEAD=head, **_EXACT)
    return out


def squared(x: torch.Tensor) -> torch.Tensor:
    """x * x in fp32."""
    out = torch.empty_like(x, dtype=torch.float32)
    launch(_square, _grid(x), x, out, x.shape[-1], **_EXACT)
    return out


def scaled(x: torch.Tensor, factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x * factor in fp32, rounded to the dtype of `x`, then * weight, rounded to it.

    Args:
        x: (batch, tokens, heads * head).
        factor: fp32, one for each head of each token.
        weight: (head,), of the dtype of `x`.
    """
    out = torch.empty_like(x)
    launch(_scale, _grid(x), x, factor, weight, out, x.shape[-1], HEAD=weight.numel(), **_EXACT)
    return out


def _grid(x: torch.Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], -(-x.shape[-1] // _BLOCK)


def _strides(tensor: torch.Tensor, x: torch.Tensor) -> tuple[int, int]:
    """Strides of batch and token; zero where one value is for all."""
    batch, tokens, _ = tensor.expand(*x.shape[:2], tensor.shape[-1]).stride()
    return batch, tokens


if TYPE_CHECKING:  # Triton reads its functions as source; to a type checker their arguments mean nothing
    _normalize: Any
    _modulate: Any
    _gate: Any
    _rotate: Any
    _square: Any
    _scale: Any
elif triton is not None:

    @triton.jit
    def _channels(N, BLOCK: tl.constexpr):
        """Places of this program in its token, which of them exist, and the place of the first in memory."""
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        return at, at < N, tl.program_id(0).to(tl.int64) * N

    @triton.jit
    def _of_token(P, S, batch, token, at, mask):
        """Values that a batch or token has for its channels."""
        row = tl.program_id(0).to(tl.int64)
        return tl.load(P + row // S * batch + row % S * token + at, mask=mask, other=0.0).to(tl.float32)

    @triton.jit(do_not_specialize=["S"])
    def _normalize(
        X, MEAN, RSTD, SCALE, SHIFT, OUT, S, N, sb, ss, tb, ts, AFFINE: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        at, mask, start = _channels(N, BLOCK)
        value = tl.load(X + start + at, mask=mask, other=0.0).to(tl.float32)
        value = (value - tl.load(MEAN + tl.program_id(0))) * tl.load(RSTD + tl.program_id(0))
        scale, shift = _of_token(SCALE, S, sb, ss, at, mask), _of_token(SHIFT, S, tb, ts, at, mask)
        if AFFINE:  # noqa: SIM108 - Triton compiles one of the two; fused as in torch's kernel
            value = tl.fma(scale, value, shift)
        else:
            value = value * (1.0 + scale) + shift
        tl.store(OUT + start + at, value.to(OUT.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["S"])
    def _modulate(X, SCALE, SHIFT, OUT, S, N, sb, ss, tb, ts, BLOCK: tl.constexpr):
        at, mask, start = _channels(N, BLOCK)
        dtype = X.dtype.element_ty
        value = tl.load(X + start + at, mask=mask, other=0.0).to(tl.float32)
        scale = (1.0 + _of_token(SCALE, S, sb, ss, at, mask)).to(dtype).to(tl.float32)
        value = (value * scale).to(dtype).to(tl.float32) + _of_token(SHIFT, S, tb, ts, at, mask)
        tl.store(OUT + start + at, value.to(dtype), mask=mask)

    @triton.jit(do_not_specialize=["S"])
    def _gate(X, UPDATE, GATE, OUT, S, N, gb, gs, WIDE: tl.constexpr, BLOCK: tl.constexpr):
        at, mask, start = _channels(N, BLOCK)
        dtype = X.dtype.element_ty
        update = tl.load(UPDATE + start + at, mask=mask, other=0.0).to(tl.float32)
        product = _of_token(GATE, S, gb, gs, at, mask) * update
        if not WIDE:
            product = product.to(dtype).to(tl.float32)
        value = tl.load(X + start + at, mask=mask, other=0.0).to(tl.float32) + product
        tl.store(OUT + start + at, value.to(dtype), mask=mask)

    @triton.jit(do_not_specialize=["S"])
    def _rotate(X, COSINE, SINE, OUT, S, N, FUSED: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr):
        at, mask, start = _channels(N, BLOCK)
        pair = tl.program_id(1) * BLOCK + 2 * tl.arange(0, BLOCK // 2)
        angle = tl.program_id(0).to(tl.int64) % S * HEAD + pair % HEAD
        cosine = tl.load(COSINE + angle, mask=pair < N, other=0.0)
        sine = tl.load(SINE + angle + 1, mask=pair < N, other=0.0)
        value = tl.load(X + start + at, mask=mask, other=0.0).to(COSINE.dtype.element_ty)
        even, odd = tl.split(tl.reshape(value, (BLOCK // 2, 2)))
        if FUSED:  # as nvcc compiles torch's product of complex numbers
            even, odd = tl.fma(even, cosine, -(odd * sine)), tl.fma(even, sine, odd * cosine)
        else:
            even, odd = even * cosine - odd * sine, even * sine + odd * cosine
        turned = tl.reshape(tl.join(even, odd).to(tl.float32), (BLOCK,))
        tl.store(OUT + start + at, turned.to(OUT.dtype.element_ty), mask=mask)

    @triton.jit
    def _square(X, OUT, N, BLOCK: tl.constexpr):
        at, mask, start = _channels(N, BLOCK)
        value = tl.load(X + start + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(OUT + start + at, value * value, mask=mask)

    @triton.jit
    def _scale(X, FACTOR, WEIGHT, OUT, N, HEAD: tl.constexpr, BLOCK: tl.constexpr):
        at, mask, start = _channels(N, BLOCK)
        dtype = X.dtype.element_ty
        value = tl.load(X + start + at, mask=mask, other=0.0).to(tl.float32)
        value *= tl.load(FACTOR + start // HEAD + at // HEAD, mask=mask, other=0.0)
        weight = tl.load(WEIGHT + at % HEAD, mask=mask, other=0.0).to(tl.float32)
        tl.store(OUT + start + at, (value.to(dtype).to(tl.float32) * weight).to(dtype), mask=mask)
