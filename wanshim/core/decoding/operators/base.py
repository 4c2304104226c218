"""The operators of decoder and encoder, once as the framework computes them and once as fast as they go.

`StrictOperators` calls the framework's own norm modules, keeps its memory layout and its rounding at every step; only
the copies are gone (one write into a padded window instead of clone, cat and pad). Its results are bit-identical to
the framework's wherever the convolution sees the same shapes.

`FastOperators` keeps activations in channels_last_3d, leaves the padding to cuDNN, sums bias, residual and norm in one
pass in fp32 and rounds once. It computes the convolution behind an upsampling from the picture before it, convolutions
over three frames by Winograd's method where that is faster, and takes several latent frames per call. Tolerance against
strict: 1e-5 in fp32, and in bf16 what rounding in another order gives (docs/measured/decode.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from wanshim.core.decoding.model.graph import Attention, Conv, Norm, Sampler, Shortcut
from wanshim.core.shared.kernel_launch import takes_kernels

from . import fused, winograd
from .attention_kernel import attend, attend_in_parts
from .convolution import ByWinograd, Convolve, torch_convolve
from .layout import dense, duplicate, folded_average, frames_apart, frames_last, interleave
from .weights import FEW, FastWeights, by_phase, squares_apart, widened
from .window import Ahead, Pending, Slab, Window
from .winograd import DeferredOutput, Products


def conv_flags() -> tuple[object, ...]:
    """The flags of torch by which it chooses the engine of a convolution."""
    cudnn = torch.backends.cudnn
    try:
        precision: object = cudnn.allow_tf32
    except RuntimeError:  # torch knows two ways to choose it, and the other one was taken
        precision = cudnn.conv.fp32_precision
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled(), precision


class StrictOperators:
    """The framework's own arithmetic, step by step.

    Args:
        split: the dim (3 rows, 4 columns) that ranks share, or None.
    """

    def __init__(self, split: int | None = None) -> None:
        self.split = split
        self.ahead: Ahead | None = None  # chunks are small: nothing is sent ahead

    def quant(self, conv: Conv, latent: torch.Tensor) -> torch.Tensor:
        return _convolve(conv, latent, 0)

    def plain_window(self, conv: Conv, x: torch.Tensor) -> Window:
        return self._window(conv, x)

    def normed_window(self, norm: Norm, conv: Conv, x: Pending, *, keep: bool) -> tuple[Window, torch.Tensor | None]:
        value = self.resolve(x)
        return self._window(conv, F.silu(norm.module(value))), value if keep else None

    def summed_window(self, conv: Conv, x: Pending, *, past: bool = True) -> Window:
        return self._window(conv, self.resolve(x), conv.history if past else 0)

    def time_window(self, conv: Conv, x: Pending) -> tuple[Window, Pending]:
        value = self.resolve(x)
        return self._window(conv, value[:, :, 1:]), Pending(value if value.shape[2] == 1 else value[:, :, :1])

    def resized_window(self, up: Sampler, lead: Pending | None, pairs: Pending | None) -> Window:
        assert up.resize is not None
        parts = [self.resolve(lead)] if lead is not None else []
        if pairs is not None:
            parts.append(interleave(self.resolve(pairs)))
        x = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        b, c, t, h, w = x.shape
        large = up.resize(x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w))
        large = large.view(b, t, c, *large.shape[2:]).permute(0, 2, 1, 3, 4)
        if self.split is None:
            return Window(up.conv, large, 0, (0, 0), (0, 0))
        return self._window(up.conv, large)

    def conv(self, window: Window) -> Pending:
        padding = window.padding()
        if len(window.conv.kernel) == 3:
            return Pending(_convolve(window.conv, window.data, (0, *padding)))
        return Pending(_per_frame(window.conv, window.data, padding))

    def pointwise(self, conv: Conv, x: torch.Tensor) -> torch.Tensor:
        return _convolve(conv, x, 0)

    def resolve(self, x: Pending) -> torch.Tensor:
        main, _, skip = x.take()
        return main if skip is None else main + skip

    def join(self, lead: torch.Tensor, rest: Pending) -> Pending:
        return Pending(torch.cat((lead, self.resolve(rest)), 2))

    def add_duplicate(self, dup: Shortcut, x: Pending, source: torch.Tensor, first: bool) -> Pending:
        return Pending(self.resolve(x) + duplicate(dup, source, first))

    def average(self, average: Shortcut, source: torch.Tensor) -> torch.Tensor:
        value = average.module(source)
        assert isinstance(value, torch.Tensor)
        return value

    def project(self, block: Attention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, c, t, h, w = x.shape
        frames = block.norm.module(x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w))
        qkv = _convolve(block.qkv, frames, 0)
        qkv = qkv.reshape(b * t, 1, c * 3, -1).permute(0, 1, 3, 2).contiguous()
        return qkv[..., :c], qkv[..., c:]

    def attend(self, block: Attention, queries: torch.Tensor, tokens: torch.Tensor, skip: torch.Tensor) -> Pending:
        b, c, t, h, w = skip.shape
        keys, values = tokens.chunk(2, dim=-1)
        x = attend_in_parts(queries, keys, values)
        x = _convolve(block.proj, x.squeeze(1).permute(0, 2, 1).reshape(b * t, c, h, w), 0)
        return Pending(x.view(b, t, c, h, w).permute(0, 2, 1, 3, 4), skip=skip)

    def _window(self, conv: Conv, own: torch.Tensor, history: int | None = None) -> Window:
        """Own values in a zeroed frame: where the framework pads in memory (3-D inputs, strides), so does this."""
        history = conv.history if history is None else history
        rows, columns = margins(conv, self.split, explicit=len(conv.kernel) == 3)
        b, c, t, h, w = own.shape
        data = own.new_zeros((b, c, history + t, h + sum(rows), w + sum(columns)))
        window = Window(conv, data, history, rows, columns, self.split)
        window.own().copy_(own)
        return window


class FastOperators:
    """channels_last_3d throughout, one pass for bias, residual, norm and SiLU, one rounding.

    Args:
        convolve: what computes the convolutions that have neighbours in space or time.
        by_winograd: what may compute those over three frames with fewer products.
    """

    def __init__(
        self,
        weights: FastWeights,
        split: int | None = None,
        convolve: Convolve = torch_convolve,
        by_winograd: ByWinograd | None = None,
    ) -> None:
        self.weights = weights
        self.split = split
        self.ahead: Ahead | None = None
        self._convolve = convolve
        self._by_winograd = by_winograd

    def quant(self, conv: Conv, latent: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights.of(conv)
        return F.conv3d(dense(latent.shape, weight).copy_(latent), weight, bias)

    def plain_window(self, conv: Conv, x: torch.Tensor) -> Window:
        x = x.to(self.weights.dtype)
        window = self._window(conv, x, x.shape[2], x.shape[3], x.shape[4])
        window.own().copy_(x)
        return window

    def normed_window(self, norm: Norm, conv: Conv, x: Pending, *, keep: bool) -> tuple[Window, torch.Tensor | None]:
        ahead = None if x.by_phase else self.ahead
        if ahead is not None and self.split is not None:  # others wait for a part of every frame
            x = _computed(x)
        window = self._window(conv, x.like(), *x.shape()[2:])
        own, slabs = window.own(), [] if ahead is None else ahead.slabs(window)
        kept = x.place() if keep else None
        main, bias, skip = x.take()
        written = None if kept is main and bias is None and skip is None else kept
        if isinstance(main, torch.Tensor):
            for slab in slabs:  # computed twice: they are few, and the sum may replace `main`
                part = None if skip is None else slab.of(skip)
                fused.norm_into(slab.of(main), bias, part, norm, slab.of(own), silu=True, kept=None)
            slabs = []
        if ahead is not None and not slabs:
            ahead.begin(window)
            ahead = None
        for frames, values in _pieces(main):
            parts = [None if each is None else frames.of(each) for each in (skip, written)]
            fused.norm_into(values, bias, parts[0], norm, frames.of(own), silu=True, kept=parts[1])
            if ahead is not None and all(frames.start <= slab.start for slab in slabs):
                ahead.begin(window)
                ahead = None
        return window, kept

    def summed_window(self, conv: Conv, x: Pending, *, past: bool = True) -> Window:
        window = self._window(conv, x.like(), *x.shape()[2:], history=conv.history if past else 0)
        main, bias, skip = x.take()
        _sum_into(main, bias, skip, window.own())
        return window

    def time_window(self, conv: Conv, x: Pending) -> tuple[Window, Pending]:
        x = _computed(x)
        (b, c, _, h, w), by_phase = x.shape(), x.by_phase
        main, bias, skip = x.take()
        assert isinstance(main, torch.Tensor)
        ahead = dense((b, c, 1, h, w), main)  # a copy lets go of the rest
        fused.sum_into(main[:, :, :1], bias, None if skip is None else skip[:, :, :1], ahead)
        rest = Pending(main[:, :, 1:], bias, None if skip is None else skip[:, :, 1:], by_phase)
        del main, skip
        return self.summed_window(conv, rest), Pending(ahead)

    def resized_window(self, up: Sampler, lead: Pending | None, pairs: Pending | None) -> Window:
        like = next(x for x in (pairs, lead) if x is not None)
        ahead = lead.shape()[2] if lead is not None else 0
        behind = 2 * pairs.shape()[2] if pairs is not None else 0
        window = self._window(up.conv, like.like(), ahead + behind, *like.shape()[3:], small=True)
        own = window.own()
        if lead is not None:
            _sum_into(*lead.take(), own[:, :, :ahead])
        if pairs is not None:
            main, bias, skip = _computed(pairs).take()
            assert isinstance(main, torch.Tensor)
            fused.interleave_into(main, bias, skip, own[:, :, ahead:])
        return window

    def conv(self, window: Window) -> Pending:
        weight, bias = self.weights.of(window.conv)
        padding, stride = window.padding(), window.conv.stride
        if window.small:
            weight = self.weights.made(window.conv, by_phase)
        if _in_squares(window):
            squares = self._convolve(window.data, self.weights.made(window.conv, widened), (1, 2, 2), (0, *padding))
            return Pending(squares_apart(squares, window.conv.out_channels), bias)
        if self._by_winograd is not None and winograd.applies(window.conv):
            split = partial(self.weights.made, window.conv, winograd.split_weight)
            deferred = self._by_winograd(window.data, weight, split, (0, *padding))
            if deferred is not None:
                return Pending(deferred, bias)
        if len(window.conv.kernel) == 3:
            return Pending(self._convolve(window.data, weight, stride, (0, *padding)), bias)
        out = self._convolve(frames_last(window.data), weight, stride, padding)
        return Pending(frames_apart(out, window.data.shape[0]), bias, by_phase=window.small)

    def pointwise(self, conv: Conv, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights.of(conv)
        return F.linear(x.permute(0, 2, 3, 4, 1), weight.flatten(1), bias).permute(0, 4, 1, 2, 3)

    def resolve(self, x: Pending) -> torch.Tensor:
        total = x.place()
        main, bias, skip = x.take()
        if main is not total or bias is not None or skip is not None:
            _sum_into(main, bias, skip, total)
        return total

    def join(self, lead: torch.Tensor, rest: Pending) -> Pending:
        b, c, t, h, w = rest.shape()
        joined = dense((b, c, lead.shape[2] + t, h, w), rest.like())
        main, bias, skip = rest.take()
        joined[:, :, : lead.shape[2]] = lead
        _sum_into(main, bias, skip, joined[:, :, lead.shape[2] :])
        return Pending(joined)

    def average(self, average: Shortcut, source: torch.Tensor) -> torch.Tensor:
        return folded_average(average, source)

    def add_duplicate(self, dup: Shortcut, x: Pending, source: torch.Tensor, first: bool) -> Pending:
        x = _computed(x)
        total = x.place()
        main, bias, _ = x.take()
        assert isinstance(main, torch.Tensor)
        fused.add_duplicate(main, bias, source, dup, first, total)
        return Pending(total)

    def project(self, block: Attention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, c, t, h, w = x.shape
        normed = dense(x.shape, x)
        fused.norm_into(x, None, None, block.norm, normed, silu=False, kept=None)
        weight, bias = self.weights.of(block.qkv)
        qkv = F.linear(normed.permute(0, 2, 3, 4, 1).reshape(b * t, 1, h * w, c), weight.flatten(1), bias)
        return qkv[..., :c], qkv[..., c:]

    def attend(self, block: Attention, queries: torch.Tensor, tokens: torch.Tensor, skip: torch.Tensor) -> Pending:
        b, c, t, h, w = skip.shape
        keys, values = tokens.chunk(2, dim=-1)
        x = attend(queries, keys, values)
        weight, bias = self.weights.of(block.proj)
        out = F.linear(x.reshape(b, t, h, w, c), weight.flatten(1), bias)
        return Pending(out.permute(0, 4, 1, 2, 3), skip=skip)

    def _window(
        self,
        conv: Conv,
        like: torch.Tensor,
        t: int,
        h: int,
        w: int,
        *,
        history: int | None = None,
        small: bool = False,
    ) -> Window:
        history = conv.history if history is None else history
        rows, columns = margins(conv, self.split)
        shape = (like.shape[0], conv.in_channels, history + t, h + sum(rows), w + sum(columns))
        window = Window(conv, dense(shape, like), history, rows, columns, self.split, small)
        zero_margins(window)
        return window


# What the network needs. A mode may set `ahead`: fast operators compute first what it sends.
Operators: TypeAlias = StrictOperators | FastOperators


def _pieces(main: torch.Tensor | DeferredOutput) -> Iterator[tuple[Slab, torch.Tensor | Products]]:
    """`main` and its frames, all at once or, as they are computed, from the last piece to the first."""
    if isinstance(main, torch.Tensor):
        yield Slab(2, 0, main.shape[2]), main
        return
    for start, products in main.pieces():
        yield Slab(2, start, products.frames), products


def _sum_into(
    main: torch.Tensor | DeferredOutput, bias: torch.Tensor | None, skip: torch.Tensor | None, out: torch.Tensor
) -> None:
    for frames, values in _pieces(main):
        fused.sum_into(values, bias, None if skip is None else frames.of(skip), frames.of(out))


def _computed(x: Pending) -> Pending:
    """`x` with a main that is a tensor."""
    if isinstance(x.main, torch.Tensor):
        return x
    shape, like = x.shape(), x.like()
    main, bias, skip = x.take()
    out = dense(shape, like)
    _sum_into(main, None, None, out)
    return Pending(out, bias, skip)


def margins(conv: Conv, split: int | None, *, explicit: bool = False) -> tuple[tuple[int, int], tuple[int, int]]:
    """The margins of rows and columns that a window of `conv` has in memory; cuDNN pads only both sides alike."""
    explicit = explicit or conv.halo[0] != conv.halo[1]
    return conv.halo if explicit or split == 3 else (0, 0), conv.halo if explicit or split == 4 else (0, 0)


def _in_squares(window: Window) -> bool:
    """Does a convolution of few channels compute 2 x 2 of its outputs at once?"""
    conv, (height, width) = window.conv, window.shape()[3:]
    fits = conv.out_channels <= FEW and conv.kernel == (3, 3, 3) and conv.stride == (1, 1, 1)
    return fits and takes_kernels(window.data) and height % 2 == width % 2 == 0


def zero_margins(window: Window) -> None:
    for dim in (3, 4):
        before, after = window.margins(dim)
        if before:
            window.data.narrow(dim, 0, before).zero_()
        if after:
            window.data.narrow(dim, window.data.shape[dim] - after, after).zero_()


def _convolve(conv: Conv, x: torch.Tensor, padding: Any) -> torch.Tensor:
    module = conv.current()
    function = F.conv3d if x.dim() == 5 else F.conv2d
    return function(x, module.weight, module.bias, conv.stride, padding)  # type: ignore[arg-type]


def _per_frame(conv: Conv, x: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    b, c, t, h, w = x.shape
    out = _convolve(conv, x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w), padding)
    return out.view(b, t, *out.shape[1:]).permute(0, 2, 1, 3, 4)
