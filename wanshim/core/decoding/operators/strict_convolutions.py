"""The fastest way in which each convolution gets the framework's bits: found out on this device, before the first of
its size.

All ways to compute a convolution are tried on random values, the fastest first, until one gives what the framework's
own call gives. What a model holds at first may be zeros, which say nothing about the order in which a way adds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from wanshim.core.decoding.model.graph import Conv
from wanshim.core.shared.recent import Recent

from . import strict_kernels as kernels
from .base import conv_flags
from .convolution import Convolve, torch_convolve
from .engines import Engines
from .learning import NotYet

ALIGNED = 16  # bytes: cuDNN has other kernels for weights that do not begin at a multiple
_COMPARED = 2**18  # outputs
_DRAWS = 16  # at most, of small sizes
_BINADES = 7  # of the magnitudes of channels, and of positions, whose terms cancel
_SMALL = 2.0 ** (-2 * _BINADES)
_AT_ONCE = 16  # channels


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute a convolution; as it stands, the framework's: zeros in memory, the bias inside.

    Args:
        relaid: what convolves channels last; None: torch, channels first.
        padded: of three dimensions, zeros around the input must lie in memory.
        biased: the bias must be added inside the convolution.
        strides: of the framework's result, which may lie channels last too: a norm adds in the order of memory. None:
            as this way leaves it.
    """

    relaid: Convolve | None = None
    padded: bool = True
    biased: bool = True
    strides: tuple[int, ...] | None = field(default=None, compare=False)

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
        # Called before the host waits for the device, to bound that wait.
        self.settle: Callable[[], object] = lambda: None
        self._found: Recent[tuple[object, ...], Way] = Recent()
        self._unlearned: Recent[tuple[object, ...], None] = Recent()  # found without knowing all engines
        self._channels_first: set[str] = set()
        self._inputs: Recent[tuple[int, ...], None] = Recent()

    def of(self, conv: Conv, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor) -> Way:
        """The way of `conv` for an input of `shape` in the dtype and on the device of `like`."""
        module = conv.current()
        layer = (module.weight.shape, tuple(module.stride), module.bias is None)
        key = (shape, padding, like.dtype, like.device, *layer, *conv_flags())
        if module.weight.data_ptr() % ALIGNED:
            way = FRAMEWORK
        elif key in self._found and not (key in self._unlearned and self.engines is not None and self.engines.learn):
            way = self._found[key]
        else:
            self.settle()
            self._unlearned.pop(key, None)
            way, learned = _find(module, shape, padding, like, self.engines)
            self._found[key] = way
            if not learned:
                self._unlearned[key] = None
            self._inputs.clear()  # inputs of before may have other sizes too now: another dtype, or another mode
        if way.relaid is None:
            self._channels_first.add(conv.name)
        return way

    def finished(self, given: tuple[int, ...]) -> None:
        """A call with an input of this shape has ended well: all its convolutions were asked for."""
        self._inputs[given] = None

    def channels_first(self, given: tuple[int, ...]) -> list[str] | None:
        """The convolutions that do not run channels last in a call with this input; None: not known yet."""
        return sorted(self._channels_first) if given in self._inputs else None


def _find(
    module: Any, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor, engines: Engines | None
) -> tuple[Way, bool]:
    """The way, and whether a later call cannot find a better one."""
    learned = True
    with suppress(RuntimeError):  # to compare takes more memory than to decode: torch, or cuDNN, finds too little
        samples = _samples(module, shape, padding, like)
        strides = samples[0].expected.stride()

        def gives(way: Way) -> bool:
            return all(sample.gives(way) for sample in samples)

        if engines is not None and samples[0].expected.shape[-2:].numel() > 1:  # one position is both first and last
            with suppress(RuntimeError):
                try:
                    engine = samples[0].engine(engines)
                except NotYet:
                    engine, learned = None, False
                if engine is not None and all(sample.gives(Way(relaid=engine)) for sample in samples[1:]):
                    return Way(relaid=engine, strides=strides), learned
                if gives(Way(relaid=torch_convolve)):
                    return Way(relaid=torch_convolve, strides=strides), learned
        way = next(way for way in _CHANNELS_FIRST if way == FRAMEWORK or gives(way))
        return replace(way, strides=strides), learned
    return FRAMEWORK, learned


def _samples(module: Any, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor) -> list[_Sample]:
    samples = [_Sample.of(module, shape, padding, like, 0)]
    draws = min(-(-_COMPARED // samples[0].expected.numel()), _DRAWS)
    return samples + [_Sample.of(module, shape, padding, like, seed) for seed in range(1, draws)]


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
    def of(
        cls, module: Any, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor, seed: int
    ) -> _Sample:
        generator = torch.Generator(like.device).manual_seed(seed)
        weight = like.new_empty(module.weight.shape).normal_(0.0, module.weight[0].numel() ** -0.5, generator=generator)
        bias = None if module.bias is None else like.new_empty(len(weight)).normal_(generator=generator)
        if len(shape) == 4:
            x = like.new_empty(shape)
            _fill(x, weight, bias, generator, seed)
            return cls(x, weight, bias, module.stride, padding, F.conv2d(x, weight, bias, module.stride, padding))
        rows, columns = padding
        padded = like.new_zeros((*shape[:-2], shape[-2] + 2 * rows, shape[-1] + 2 * columns))
        x = padded[..., rows : rows + shape[-2], columns : columns + shape[-1]]
        _fill(x, weight, bias, generator, seed)
        expected = F.conv3d(padded, weight, bias, module.stride)
        return cls(x.contiguous(), weight, bias, module.stride, padding, expected)

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


def _fill(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, generator: torch.Generator, seed: int
) -> None:
    """Random values that show in which order a convolution adds.

    Of normal ones two orders give the same bf16 for all but some of ten thousand outputs. So in the left half of a
    picture the terms of a sum cancel: what is left of them is what adding has rounded off. Tensor cores add 16 channels
    at once, so of few channels the taps cancel, the first and the last of a kernel. Every other bias is zero, or it
    would hide that. Pictures of one column are so in every other draw.
    """
    x.normal_(generator=generator)
    left = x[..., : -(-x.shape[-1] // 2) if x.shape[-1] > 1 else seed % 2]
    half = x.shape[1] // 2
    for sizes in ((1, left.shape[1], *[1] * (x.dim() - 2)), (len(left), 1, *left.shape[2:])):
        left *= torch.randint(0, _BINADES, sizes, generator=generator, device=x.device).exp2()
    if half > _AT_ONCE // 2:
        left[:, half : 2 * half] = left[:, :half]
        left[:, 2 * half :] *= _SMALL
        weight[:, half : 2 * half] = -weight[:, :half]
    elif weight.shape[2] == 3:
        left[:, :, 2::2] = left[:, :, :1]
        left[:, :, 3::2] = left[:, :, 1:2]
        weight[:, :, 2] = -weight[:, :, 0]
        weight[:, :, 1] *= _SMALL
    if bias is not None:
        bias[::2] = 0


def _full(x: torch.Tensor, padding: tuple[int, int]) -> tuple[int, ...]:
    return padding if x.dim() == 4 else (0, *padding)
