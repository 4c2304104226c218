"""How each convolution gets the framework's bits the fastest: found out on this device, before the first of its size.

All ways to compute a convolution are tried on random values, the fastest first, until one gives what the framework's
own call gives. What a model holds at first may be zeros, which say nothing about the order in which a way adds.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from wanshim.core.decoding.model.graph import Conv

from . import strict_kernels as kernels
from .convolution import Convolve, torch_convolve
from .engines import Engines

_ALIGNED = 16  # bytes: cuDNN has other kernels for weights that do not begin at a multiple


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute a convolution; as it stands, the framework's: zeros in memory, the bias inside.

    Args:
        relaid: what convolves channels last; None: torch, channels first.
        padded: of three dimensions, zeros around the input must lie in memory.
        biased: the bias must be added inside the convolution.
    """

    relaid: Convolve | None = None
    padded: bool = True
    biased: bool = True

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: tuple[int, ...],
        padding: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`x` [B, C, T, H, W] or [B * T, C, H, W], zeros around it due: the result, and the bias that it lacks."""
        if self.relaid is not None:
            relaid = self.relaid(kernels.channels_last(x), kernels.channels_last(weight), stride, _full(x, padding))
            return relaid, bias
        x = x.contiguous()
        inside, late = (bias, None) if self.biased else (None, bias)
        if x.dim() == 4:
            return F.conv2d(x, weight, inside, stride, padding), late
        if self.padded and any(padding):
            x, padding = F.pad(x, (padding[1], padding[1], padding[0], padding[0])), (0, 0)
        return F.conv3d(x, weight, inside, stride, (0, *padding)), late


FRAMEWORK = Way()
_CHANNELS_FIRST = tuple(Way(padded=padded, biased=biased) for biased in (False, True) for padded in (False, True))


class Ways:
    """The ways found, kept from call to call; convolutions of the same sizes share one."""

    def __init__(self) -> None:
        self.engines: Engines | None = None  # None: nothing is convolved channels last
        self._found: dict[tuple[object, ...], Way] = {}
        self._channels_first: set[str] = set()
        self._inputs: set[tuple[int, ...]] = set()

    def of(self, conv: Conv, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor) -> Way:
        """The way of `conv` for an input of `shape` in the dtype and on the device of `like`."""
        module = conv.current()
        key = (shape, padding, like.dtype, module.weight.shape, tuple(module.stride), module.bias is None)
        if module.weight.data_ptr() % _ALIGNED:
            way = FRAMEWORK
        elif key in self._found:
            way = self._found[key]
        else:
            way = self._found[key] = _find(module, shape, padding, like, self.engines)
        if way.relaid is None:
            self._channels_first.add(conv.name)
        return way

    def finished(self, given: tuple[int, ...]) -> None:
        """A call with an input of this shape has ended well: all its convolutions were asked for."""
        self._inputs.add(given)

    def channels_first(self, given: tuple[int, ...]) -> list[str] | None:
        """The convolutions that do not run channels last in a call with this input; None: not known yet."""
        return sorted(self._channels_first) if given in self._inputs else None


def _find(
    module: Any, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor, engines: Engines | None
) -> Way:
    with suppress(torch.OutOfMemoryError):  # to compare takes more than to decode
        sample = _Sample.of(module, shape, padding, like)
        if engines is not None and sample.expected.shape[-2:].numel() > 1:  # one position is both first and last
            with suppress(torch.OutOfMemoryError):
                if (engine := sample.engine(engines)) is not None:
                    return Way(relaid=engine)
                if sample.gives(Way(relaid=torch_convolve)):
                    return Way(relaid=torch_convolve)
        return next(way for way in _CHANNELS_FIRST if way == FRAMEWORK or sample.gives(way))
    return FRAMEWORK


@dataclass(frozen=True, slots=True)
class _Sample:
    """Random values for a convolution, and what the framework computes from them."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, int]
    expected: torch.Tensor

    @classmethod
    def of(cls, module: Any, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor) -> _Sample:
        generator = torch.Generator(like.device).manual_seed(0)
        weight = like.new_empty(module.weight.shape).normal_(0.0, module.weight[0].numel() ** -0.5, generator=generator)
        bias = None if module.bias is None else like.new_empty(len(weight)).normal_(generator=generator)
        if len(shape) == 4:
            x = like.new_empty(shape).normal_(generator=generator)
            return cls(x, weight, bias, module.stride, padding, F.conv2d(x, weight, bias, module.stride, padding))
        rows, columns = padding
        padded = like.new_zeros((*shape[:-2], shape[-2] + 2 * rows, shape[-1] + 2 * columns))
        x = padded[..., rows : rows + shape[-2], columns : columns + shape[-1]].normal_(generator=generator)
        return cls(x, weight, bias, module.stride, padding, F.conv3d(padded, weight, bias, module.stride))

    def gives(self, way: Way) -> bool:
        """Is what `way` computes expected?"""
        out, bias = way(self.x, self.weight, self.bias, self.stride, self.padding)
        return self.same(out, bias)

    def same(self, out: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Is `out` expected, with the bias that it lacks (which is added to it)?"""
        if bias is not None:
            out += bias.view(-1, *[1] * (out.dim() - 2))
        return torch.equal(out, self.expected)

    def engine(self, engines: Engines) -> Convolve | None:
        """The fastest engine that gives the result expected."""
        x, weight = kernels.channels_last(self.x), kernels.channels_last(self.weight)
        return engines.equal(x, weight, self.stride, _full(x, self.padding), lambda out: self.same(out, self.bias))


def _full(x: torch.Tensor, padding: tuple[int, int]) -> tuple[int, ...]:
    return padding if x.dim() == 4 else (0, *padding)
