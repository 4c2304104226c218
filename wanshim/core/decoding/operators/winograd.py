"""A convolution over three frames with half of the products: Winograd's F(4, 3) in time.

Four neighbouring outputs of a convolution over three frames read six frames. Directly that takes twelve products, here
six (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308): with the frames d, the taps
g and the outputs y,

    y = _OUTPUTS [(_TAPS g) * (_FRAMES d)]

which interpolates at 0, 1, -1, 1/2, -2 and infinity. These points round less than the usual ones, of which 2 and -2
are the last (Barabasz, Anderson, Soodhalter and Gregg, "Error Analysis and Improving the Accuracy of Winograd
Convolution for Deep Neural Networks", arXiv:1803.10986).

A product is a convolution in space of single frames. The six parts, and the six products, are tensors of a quarter of
the frames each; a product is written where the part before it lay, so that seven such buffers suffice. The outputs are
never stored: what reads the convolution adds up the products, some frames at a time (`DeferredOutput`).

For values of bf16 the buffers hold fp16, whose three more bits keep the sum closer than a result rounded to bf16. Its
smaller range is moved to where the values are: parts are stored as 1/8, weights as 1/16, so that outputs up to 2^22
fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from wanshim.core.decoding.model.graph import Conv
from wanshim.core.shared.kernel_launch import launch, takes_kernels
from wanshim.core.shared.optional_triton import tl, triton

from .layout import used_strides, wide

_CHANNELS = 96  # with fewer, parts and products take as long in memory as is saved
_FRAMES = (
    (1 / 4, -3 / 8, -1 / 2, 3 / 8, 1 / 4, 0),
    (0, -1 / 4, 1 / 8, 5 / 8, 1 / 4, 0),
    (0, 1 / 4, -5 / 8, 1 / 8, 1 / 4, 0),
    (0, -1 / 2, -1 / 4, 1 / 2, 1 / 4, 0),
    (0, 1 / 4, -1 / 2, -1 / 4, 1 / 2, 0),
    (0, 1 / 4, -3 / 8, -1 / 2, 3 / 8, 1 / 4),
)
_TAPS = (
    (1, 0, 0),
    (2 / 3, 2 / 3, 2 / 3),
    (-2 / 3, 2 / 3, -2 / 3),
    (-16 / 15, -8 / 15, -4 / 15),
    (4 / 15, -8 / 15, 16 / 15),
    (0, 0, 1),
)
_OUTPUTS = (
    (4, 2, 2, 4, 1 / 2, 0),
    (0, 2, -2, 2, -1, 0),
    (0, 2, 2, 1, 2, 0),
    (0, 2, -2, 1 / 2, -4, 4),
)
_BLOCK = 1024
GROUP, PARTS = len(_OUTPUTS), len(_FRAMES)
_BUFFERS = PARTS + 1
_VALUES = 1.3e9  # in the buffers together; one group may take more
_LARGEST = 2**31 - 2 * _BLOCK  # values of a frame: programs count in 32 bits
_SMALL = 1e8  # values in the buffers, which a piece may have however few frames there are
_OF_PARTS, _OF_WEIGHTS = 1 / 8, 1 / 16  # what is stored of each: powers of two, which round nothing
UNIT = 1 / _OF_PARTS / _OF_WEIGHTS  # what a product is multiplied by in a sum

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # input, weight, output


def applies(conv: Conv) -> bool:
    """Can a convolution be computed so, with a gain?"""
    channels = (conv.in_channels, conv.out_channels)
    fits = min(channels) >= _CHANNELS and all(count % 8 == 0 for count in channels)
    return conv.kernel == (3, 3, 3) and conv.stride == (1, 1, 1) and fits


def groups_at_once(frames: int, batch: int, height: int, width: int, channels: tuple[int, int]) -> int:
    """The number of groups of four of `frames` outputs in a piece; 0: too few frames for a gain, or too large ones.

    Args:
        height, width: of the input, which has as many rows and columns as the output or more.
        channels: of the input and of the output.
    """
    if frames < 3:
        return 0
    groups, frame = groups_of(frames), batch * height * width * max(channels)
    if frame > _LARGEST:
        return 0
    group = _BUFFERS * frame
    half = max((groups + 1) // 2, int(_SMALL / group))  # the buffers stay small beside the whole
    return max(1, min(int(_VALUES / group), half, groups))


def groups_of(frames: int) -> int:
    return -(-frames // GROUP)


def buffer_values(frames: int, batch: int, height: int, width: int, channels: tuple[int, int]) -> int:
    """The largest number of values in the buffers of one piece."""
    return _BUFFERS * groups_at_once(frames, batch, height, width, channels) * batch * height * width * max(channels)


def weight_values(conv: Conv) -> int:
    """The number of values in the weights of the products."""
    return PARTS * 9 * conv.in_channels * conv.out_channels


def split_weight(weight: torch.Tensor) -> torch.Tensor:
    """[C, I, 3, 3, 3] as the weights of the products, [6, C, I, 1, 3, 3], each channels last in memory."""
    taps = (_OF_WEIGHTS * wide(weight)).permute(2, 0, 3, 4, 1)
    parts = weight.new_empty((PARTS, *taps.shape[1:]), dtype=_stored(weight.dtype))
    for at, row in enumerate(_TAPS):
        parts[at] = _combined(row, taps)
    return parts.permute(0, 1, 4, 2, 3).unsqueeze(3)


@dataclass(frozen=True, slots=True)
class Products:
    """The products [B, C, groups, H, W] that `frames` outputs are the sums of."""

    parts: list[torch.Tensor]
    frames: int

    def joined(self) -> torch.Tensor:
        """The outputs, in fp32 or wider."""
        products = [UNIT * wide(part) for part in self.parts]
        outputs = [_combined(row, products) for row in _OUTPUTS]
        return torch.stack(outputs, 3).flatten(2, 3)[:, :, : self.frames]


class Buffers:
    """The parts and the products of one piece.

    Args:
        x: the piece [B, I, T + 2, H, W], channels last and dense but for its batch.
        shape: of its outputs, [B, C, T, H', W'].
        room: of the buffers of a piece at least as large, to use again.
    """

    def __init__(self, x: torch.Tensor, shape: Sequence[int], room: torch.Tensor | None = None) -> None:
        self._frames = shape[2]
        groups = groups_of(self._frames)
        shapes = [(batch, groups, *size, channels) for batch, channels, _, *size in (x.shape, shape)]
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
class DeferredOutput:
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
    """The parts of `x`; an incomplete group is followed by zeros."""
    groups, frames = parts[0].shape[2], x.shape[2]
    if triton is not None and takes_kernels(x):
        values, batch = x[0, :, 0].numel(), x.shape[0]
        sizes, strides = (groups, frames, values), (used_strides(x)[0], used_strides(parts[0])[0])
        launch(_split, (triton.cdiv(values, _BLOCK), batch), x, *parts, *sizes, *strides, _OF_PARTS, BLOCK=_BLOCK)
        return
    x = F.pad(x, (0, 0, 0, 0, 0, GROUP * groups + 2 - frames))
    given = [_OF_PARTS * wide(x[:, :, at : at + GROUP * groups : GROUP]) for at in range(PARTS)]
    for part, row in zip(parts, _FRAMES):
        part.copy_(_combined(row, given))


def _combined(row: Sequence[float], tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    terms = [factor * x for factor, x in zip(row, tensors) if factor]
    return sum(terms[1:], terms[0])


def _stored(dtype: torch.dtype) -> torch.dtype:
    """The dtype of parts, products and their weights, for values of `dtype`."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


if TYPE_CHECKING:  # Triton reads its functions as source; to a type checker their arguments mean nothing
    _split: Any
if not TYPE_CHECKING and triton is not None:

    @triton.jit(do_not_specialize=["groups", "frames"])
    def _split(X, M0, M1, M2, M3, M4, M5, groups, frames, values, xb, mb, scale, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        batch = tl.program_id(1).to(tl.int64)
        inside = at < values
        size = tl.cast(values, tl.int64)
        x, m = X + batch * xb + at, batch * mb + at
        d0 = scale * tl.load(x, mask=inside).to(tl.float32)
        d1 = scale * tl.load(x + size, mask=inside).to(tl.float32)
        for group in range(groups):
            first = 4 * group + 2
            d2 = scale * tl.load(x + first * size, mask=inside).to(tl.float32)
            there = at < tl.where(first + 1 < frames, values, 0)
            d3 = scale * tl.load(x + (first + 1) * size, mask=there, other=0.0).to(tl.float32)
            there = at < tl.where(first + 2 < frames, values, 0)
            d4 = scale * tl.load(x + (first + 2) * size, mask=there, other=0.0).to(tl.float32)
            there = at < tl.where(first + 3 < frames, values, 0)
            d5 = scale * tl.load(x + (first + 3) * size, mask=there, other=0.0).to(tl.float32)
            to = m + group * size
            dtype = M0.dtype.element_ty
            m0 = 0.25 * (d0 + d4) + 0.375 * (d3 - d1) - 0.5 * d2
            m1 = 0.25 * (d4 - d1) + 0.125 * d2 + 0.625 * d3
            m2 = 0.25 * (d4 + d1) - 0.625 * d2 + 0.125 * d3
            m3 = 0.5 * (d3 - d1) + 0.25 * (d4 - d2)
            m4 = 0.25 * (d1 - d3) + 0.5 * (d4 - d2)
            m5 = 0.25 * (d1 + d5) + 0.375 * (d4 - d2) - 0.5 * d3
            tl.store(M0 + to, m0.to(dtype), mask=inside)
            tl.store(M1 + to, m1.to(dtype), mask=inside)
            tl.store(M2 + to, m2.to(dtype), mask=inside)
            tl.store(M3 + to, m3.to(dtype), mask=inside)
            tl.store(M4 + to, m4.to(dtype), mask=inside)
            tl.store(M5 + to, m5.to(dtype), mask=inside)
            d0 = d4
            d1 = d5
