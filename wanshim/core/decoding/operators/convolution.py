"""One convolution: its outputs and their pieces, by torch, and samples of them by a matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F

from wanshim.core.decoding.plan import even_split

from .winograd import DeferredOutput

_PIECE = 1.8e12  # multiplications and additions in one call of an engine
_LARGEST = 2**31 - 1  # values of a tensor
_SAMPLES = 16  # rows and columns of the result that are compared


class Convolve(Protocol):
    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
    ) -> torch.Tensor: ...


class ByWinograd(Protocol):
    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, split: Callable[[], torch.Tensor], padding: tuple[int, ...]
    ) -> DeferredOutput | None: ...


def torch_convolve(
    x: torch.Tensor, weight: torch.Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
) -> torch.Tensor:
    """`x` [B, C, T, H, W] or [B, C, H, W] through `weight`, without a bias."""
    return Convolution(weight, tuple(stride), tuple(padding)).by_torch(x)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution without its number of frames (of images, if it is of two dimensions)."""

    weight: torch.Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @property
    def dim(self) -> int:
        """Along what the input is taken in pieces: frames of a video, or images."""
        return 2 if self.weight.dim() == 5 else 0

    @property
    def step(self) -> int:
        return self.stride[0] if self.dim else 1

    @property
    def reach(self) -> int:
        return self.weight.shape[2] if self.dim else 1

    def output_shape(self, x: torch.Tensor) -> list[int]:
        kernel = self.weight.shape[2:]
        sizes = [
            (size + 2 * pad - width) // step + 1
            for size, pad, width, step in zip(x.shape[2:], self.padding, kernel, self.stride)
        ]
        return [x.shape[0], self.weight.shape[0], *sizes]

    def empty(self, x: torch.Tensor) -> torch.Tensor:
        """An output for `x`, channels last."""
        layout = torch.channels_last_3d if self.dim else torch.channels_last
        return torch.empty(self.output_shape(x), dtype=x.dtype, device=x.device, memory_format=layout)

    def piece(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The part of `x` of which the outputs `start` to `stop` are made."""
        return x.narrow(self.dim, start * self.step, (stop - start - 1) * self.step + self.reach)

    def length(self, x: torch.Tensor) -> int:
        """The largest number of outputs along `dim` of a piece."""
        *_, height, width = self.output_shape(x)
        work = 2 * height * width * (x.shape[0] if self.dim else 1) * self.weight.numel()
        return max(1, min(round(_PIECE / work), self.longest(x)))

    def longest(self, x: torch.Tensor) -> int:
        """The largest number of outputs along `dim` for which no tensor has more than `_LARGEST` values."""
        shape = self.output_shape(x)
        values = max(prod(shape) // max(shape[self.dim], 1), x.numel() // x.shape[self.dim], 1)
        return max(1, (_LARGEST // values - self.reach) // self.step + 1)

    def spans(self, total: int, length: int, unit: int = 1) -> list[tuple[int, int]]:
        """Runs of `total` outputs, of `length` units at most each, whose lengths differ by one unit at most.

        Args:
            unit: how many outputs one has; the last may have fewer.
        """
        units = -(-total // unit)
        return [(first * unit, min(last * unit, total)) for first, last in even_split(units, -(-units // length))]

    def pieces(self, x: torch.Tensor, out: torch.Tensor, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and outputs of `length` outputs at most."""
        for start, stop in self.spans(out.shape[self.dim], length):
            yield self.piece(x, start, stop), out.narrow(self.dim, start, stop - start)

    def samples(self, x: torch.Tensor, out: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `at` along `dim` at rows and columns from edge to edge: as it is in `out`, and computed in fp32.

        A convolution of torch would wait for cuDNN's heuristics, for each size anew.
        """
        x, out = self.piece(x, at, at + 1), out.narrow(self.dim, at, 1)
        for dim in (-2, -1):
            size, count, kernel = x.shape[dim], out.shape[dim], self.weight.shape[dim]
            output = torch.linspace(0, count - 1, _SAMPLES, device=x.device).round().long()
            tap = output[:, None] * self.stride[dim] - self.padding[dim] + torch.arange(kernel, device=x.device)
            tap = tap.flatten()
            inside = (tap >= 0) & (tap < size)
            x = x.index_select(dim, tap.clamp(0, size - 1)) * (inside[:, None] if dim == -2 else inside)
            out = out.index_select(dim, output)
        height, width = self.weight.shape[-2:]
        x = x.float().unflatten(-1, (_SAMPLES, width)).unflatten(-3, (_SAMPLES, height))
        equation = "bctyhxw,octhw->boyx" if self.dim else "bcyhxw,ochw->boyx"
        return out.float().reshape(x.shape[0], -1, _SAMPLES, _SAMPLES), torch.einsum(equation, x, self.weight.float())

    def by_torch(self, x: torch.Tensor) -> torch.Tensor:
        """Without a bias; in pieces where cuDNN would count beyond 32 bits, which takes longer by far."""
        function = F.conv3d if self.dim else F.conv2d
        if max(x.numel(), prod(self.output_shape(x))) <= _LARGEST:
            return function(x, self.weight, None, self.stride, self.padding)  # type: ignore[arg-type]
        out = self.empty(x)
        for piece, part in self.pieces(x, out, self.longest(x)):
            part.copy_(function(piece, self.weight, None, self.stride, self.padding))  # type: ignore[arg-type]
        return out

    def text(self, x: torch.Tensor) -> str:
        return f"{list(x.shape)} {x.dtype} by {list(self.weight.shape)}, stride {self.stride}, padding {self.padding}"
