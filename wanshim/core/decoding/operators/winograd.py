"""A convolution over three frames with two thirds of the products: Winograd's F(2, 3) in time.

Two neighbouring outputs of a convolution with the taps g0, g1, g2 read four frames d0 to d3. Directly that takes six
products, here four (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308):

    m0 = (d0 - d2) g0                      y0 = m0 + m1 + m2
    m1 = (d1 + d2) (g0 + g1 + g2) / 2      y1 = m1 - m2 - m3
    m2 = (d2 - d1) (g0 - g1 + g2) / 2
    m3 = (d1 - d3) g2

A product is a convolution in space of single frames. The four parts, and the four products, are tensors of half as many
frames each; a product is written where the part before it lay, so that five such buffers suffice. The outputs are never
stored: what reads the convolution adds up the products, some frames at a time (`PairedOutput`).

For values of bf16 the buffers hold fp16, whose three more bits keep the result as close as the direct one. Its smaller
range is moved to where the values are: parts and weights are stored as 1/16, so that outputs up to 2^24 fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from wanshim.core.decoding.model.graph import Conv

from .layout import wide
from .optional_triton import tl, triton

_CHANNELS = 96  # with fewer, parts and products take as long in memory as is saved
_BUFFERS = 5
_VALUES = 1.2e9  # in the buffers together; one pair of frames may take more
_PART = 4  # of the frames: a piece has as many pairs, so that the buffers stay small beside the whole
_SCALE = 1 / 16  # of what is stored of parts and of weights: a power of two, which rounds nothing
UNIT = _SCALE**-2  # what a product is multiplied by in a sum
_BLOCK = 1024

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # input, weight, output


def applies(conv: Conv) -> bool:
    """Can a convolution be computed by pairs of frames, with a gain?"""
    channels = (conv.in_channels, conv.out_channels)
    fits = min(channels) >= _CHANNELS and all(count % 8 == 0 for count in channels)
    return conv.kernel == (3, 3, 3) and conv.stride == (1, 1, 1) and fits


def pairs_at_once(frames: int, batch: int, height: int, width: int, channels: tuple[int, int]) -> int:
    """How many pairs of `frames` outputs a piece has; 0: too few frames for a gain.

    Args:
        height, width: of the input, which has as many rows and columns as the output or more.
        channels: of the input and of the output.
    """
    if frames < 4:
        return 0
    pair = _BUFFERS * batch * height * width * max(channels)
    return max(1, min(int(_VALUES / pair), frames // _PART))


def buffer_values(frames: int, batch: int, height: int, width: int, channels: tuple[int, int]) -> int:
    """How many values the buffers of one piece hold at most."""
    return _BUFFERS * pairs_at_once(frames, batch, height, width, channels) * batch * height * width * max(channels)


def weight_values(conv: Conv) -> int:
    """How many values the weights of the four products have."""
    return 4 * 9 * conv.in_channels * conv.out_channels


def split_weight(weight: torch.Tensor) -> torch.Tensor:
    """[C, I, 3, 3, 3] as the weights of the four products, [4, C, I, 1, 3, 3], each channels last in memory."""
    first, middle, last = (_SCALE * wide(weight)).permute(2, 0, 3, 4, 1)
    parts = weight.new_empty((4, *first.shape), dtype=_stored(weight.dtype))
    parts[0], parts[3] = first, last
    parts[1] = (first + middle + last) / 2
    parts[2] = (first - middle + last) / 2
    return parts.permute(0, 1, 4, 2, 3).unsqueeze(3)


@dataclass(frozen=True, slots=True)
class Products:
    """The four products [B, C, pairs, H, W] that `frames` outputs are the sums of."""

    parts: list[torch.Tensor]
    frames: int

    def joined(self) -> torch.Tensor:
        """The outputs, in fp32 or wider."""
        m0, m1, m2, m3 = (UNIT * wide(part) for part in self.parts)
        return torch.stack((m0 + m1 + m2, m1 - m2 - m3), 3).flatten(2, 3)[:, :, : self.frames]


class Buffers:
    """The parts and the products of one piece.

    Args:
        x: the piece [B, I, T + 2, H, W], channels last and dense but for its batch.
        shape: of its outputs, [B, C, T, H', W'].
        room: of the buffers of a piece at least as large, to use again.
    """

    def __init__(self, x: torch.Tensor, shape: Sequence[int], room: torch.Tensor | None = None) -> None:
        self._frames = shape[2]
        pairs = (self._frames + 1) // 2
        shapes = [(batch, pairs, *size, channels) for batch, channels, _, *size in (x.shape, shape)]
        sizes = [torch.Size(each).numel() for each in shapes]
        if room is None:
            room = x.new_empty((_BUFFERS, max(sizes)), dtype=_stored(x.dtype))
        self.room = room
        before, after = (
            [each[:size].view(shape).permute(0, 4, 1, 2, 3) for each in room] for shape, size in zip(shapes, sizes)
        )
        self.parts, self.products = before[1:], after[:-1]

    def multiply(self, x: torch.Tensor, weights: torch.Tensor, product: Product) -> Products:
        """The products of `x`; `weights` are those of `split_weight`."""
        split_into(x, self.parts)
        for part, weight, result in zip(self.parts, weights, self.products):
            product(part, weight, result)
        return Products(self.products, self._frames)


@dataclass(frozen=True, slots=True)
class PairedOutput:
    """The output of a convolution that is computed when it is read, piece by piece. It is read once.

    Args:
        x: the input [B, I, T + 2, H, W].
        shape: of the output, [B, C, T, H', W'].
        weights: those of `split_weight`.
        runs: the first frame of each piece, the frame behind its last, and what computes its products.
    """

    x: torch.Tensor
    shape: torch.Size
    weights: torch.Tensor
    runs: Sequence[tuple[int, int, Product]]

    def pieces(self) -> Iterator[tuple[int, Products]]:
        """The first frame and the products of each piece, the last first. The next one overwrites them."""
        room = self._buffers(*max(self.runs, key=lambda run: run[1] - run[0])[:2]).room
        for start, stop, run in reversed(self.runs):
            with torch.cuda.device_of(self.x):
                products = self._buffers(start, stop, room).multiply(self._piece(start, stop), self.weights, run)
            yield start, products

    def _buffers(self, start: int, stop: int, room: torch.Tensor | None = None) -> Buffers:
        return Buffers(self._piece(start, stop), (*self.shape[:2], stop - start, *self.shape[3:]), room)

    def _piece(self, start: int, stop: int) -> torch.Tensor:
        return self.x[:, :, start : stop + 2]


def split_into(x: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """The parts of `x`; an odd number of frames is followed by zeros."""
    pairs, frames = parts[0].shape[2], x.shape[2]
    if triton is not None and x.is_cuda:
        values, batch = x[0, :, 0].numel(), x.shape[0]
        _split[(triton.cdiv(values, _BLOCK), batch)](
            x, *parts, pairs, frames, values, x.stride(0), parts[0].stride(0), _SCALE, BLOCK=_BLOCK
        )
        return
    if frames < 2 * pairs + 2:
        x = torch.cat((x, torch.zeros_like(x[:, :, :1])), 2)
    d0, d1, d2, d3 = (wide(x[:, :, at : at + 2 * pairs : 2]) for at in range(4))
    for part, value in zip(parts, (d0 - d2, d1 + d2, d2 - d1, d1 - d3)):
        part.copy_(_SCALE * value)


def _stored(dtype: torch.dtype) -> torch.dtype:
    """What parts, products and their weights are stored in, for values of `dtype`."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


if TYPE_CHECKING:  # Triton reads its functions as source; to a type checker their arguments mean nothing
    _split: Any
if not TYPE_CHECKING and triton is not None:

    @triton.jit(do_not_specialize=["pairs", "frames"])
    def _split(X, M0, M1, M2, M3, pairs, frames, values, xb, mb, scale, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        batch = tl.program_id(1).to(tl.int64)
        inside = at < values
        x, m = X + batch * xb, batch * mb
        d0 = tl.load(x + at, mask=inside).to(tl.float32)
        d1 = tl.load(x + tl.cast(values, tl.int64) + at, mask=inside).to(tl.float32)
        for pair in range(pairs):
            third = x + (2 * pair + 2) * tl.cast(values, tl.int64)
            d2 = tl.load(third + at, mask=inside).to(tl.float32)
            fourth = at < tl.where(2 * pair + 3 < frames, values, 0)
            d3 = tl.load(third + tl.cast(values, tl.int64) + at, mask=fourth, other=0.0).to(tl.float32)
            to = m + pair * tl.cast(values, tl.int64)
            tl.store(M0 + to + at, (scale * (d0 - d2)).to(M0.dtype.element_ty), mask=inside)
            tl.store(M1 + to + at, (scale * (d1 + d2)).to(M1.dtype.element_ty), mask=inside)
            tl.store(M2 + to + at, (scale * (d2 - d1)).to(M2.dtype.element_ty), mask=inside)
            tl.store(M3 + to + at, (scale * (d1 - d3)).to(M3.dtype.element_ty), mask=inside)
            d0 = d2
            d1 = d3
