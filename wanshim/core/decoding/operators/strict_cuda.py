"""Strict operators for CUDA: the framework's bits in fewer passes.

Norm and SiLU are one kernel behind torch's own reduction, a convolution's zeros in space come from cuDNN instead of a
padded copy, its bias is added together with the residual, and nearest upsampling, the interleaving of frames and the
2.2 shortcut are one gather each. A convolution that gives the same bits channels last gets its window in that layout:
the kernel before it writes there, the one behind it reads from there, and the frames of the past are one run of memory.
Sums lie as the framework has them, because the order of a norm's reduction depends on it: behind a convolution as its
own call would leave them, which may be channels last too. What is not known to give the same bits here
(`strict_checks.py`, `strict_convolutions.py`) stays as `StrictOperators` does it.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F

from wanshim.core.decoding.model.graph import Conv, Norm, Sampler, Shortcut

from . import strict_kernels as kernels
from .base import StrictOperators, margins, zero_margins
from .layout import dense
from .strict_checks import Checks, Sizes
from .strict_convolutions import FRAMEWORK, Way
from .window import Pending, Window

_Margins: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


class StrictCudaOperators(StrictOperators):
    """`StrictOperators` for CUDA with Triton; see the module's docstring."""

    def __init__(self, checks: Checks, split: int | None = None) -> None:
        super().__init__(split)
        self.checks = checks
        self._ways: dict[tuple[Conv, tuple[int, ...], int], tuple[Way, _Margins]] = {}  # of one call

    def normed_window(self, norm: Norm, conv: Conv, x: Pending, *, keep: bool) -> tuple[Window, torch.Tensor | None]:
        value = self.resolve(x)
        way = self.checks.norm(norm, value)
        if way is Sizes.OWN or not kernels.planar(value):
            return self._window(conv, F.silu(norm.module(value))), value if keep else None
        window = self._empty_window(conv, tuple(value.shape), value)
        size, fused = self.checks.sizes(norm, value, way), self.checks.silu(value.dtype)
        normed = window.own() if fused else torch.empty_like(value)
        kernels.norm_into(value, size, norm.gamma, norm.scale, normed, silu=fused)
        if not fused:
            window.own().copy_(F.silu(normed))
        return window, value if keep else None

    def summed_window(self, conv: Conv, x: Pending, *, past: bool = True) -> Window:
        shape = x.shape()
        main, bias, skip = x.take()
        window = self._empty_window(conv, shape, main, conv.history if past else 0)
        kernels.sum_into(main, bias, skip, window.own())
        return window

    def resized_window(self, up: Sampler, lead: Pending | None, pairs: Pending | None) -> Window:
        like = next(x for x in (lead, pairs) if x is not None)
        counts = [0 if x is None else x.shape()[2] * n for x, n in ((lead, 1), (pairs, 2))]
        b, _, _, h, w = like.shape()
        assert like.main is not None
        window = self._empty_window(up.conv, (b, up.conv.in_channels, sum(counts), 2 * h, 2 * w), like.main)
        own = window.own()
        if lead is not None:
            kernels.resize_into(*lead.take(), own[:, :, : counts[0]], pairs=False)
        if pairs is not None:
            kernels.resize_into(*pairs.take(), own[:, :, counts[0] :], pairs=True)
        return window

    def conv(self, window: Window) -> Pending:
        way, _ = self._way(window.conv, window.shape(), window.data, window.history)
        if len(window.conv.kernel) == 3:
            return Pending(*_convolve(way, window.conv, window.data, window.padding()), strides=way.strides)
        b, c, t, h, w = window.data.shape
        frames = window.data.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w)
        out, bias = _convolve(way, window.conv, frames, window.padding())
        strides = (
            None if way.strides is None else (t * way.strides[0], way.strides[1], way.strides[0], *way.strides[2:])
        )
        return Pending(out.view(b, t, *out.shape[1:]).permute(0, 2, 1, 3, 4), bias, strides=strides)

    def pointwise(self, conv: Conv, x: torch.Tensor) -> torch.Tensor:
        out, bias = _convolve(self.checks.ways.of(conv, tuple(x.shape), (0, 0), x), conv, x, (0, 0))
        if bias is not None:
            kernels.sum_into(out, bias, None, out)
        return out

    def resolve(self, x: Pending) -> torch.Tensor:
        total = _sum_place(x)
        main, bias, skip = x.take()
        if main is not total or bias is not None or skip is not None:
            kernels.sum_into(main, bias, skip, total)
        return total

    def add_duplicate(self, dup: Shortcut, x: Pending, source: torch.Tensor, first: bool) -> Pending:
        total = _sum_place(x)
        main, bias, skip = x.take()
        assert skip is None
        kernels.add_duplicate(main, bias, source, dup, first, total)
        return Pending(total)

    def _window(self, conv: Conv, own: torch.Tensor, history: int | None = None) -> Window:
        window = self._empty_window(conv, tuple(own.shape), own, history)
        window.own().copy_(own)
        return window

    def _empty_window(
        self, conv: Conv, shape: tuple[int, ...], like: torch.Tensor, history: int | None = None
    ) -> Window:
        """A window to write into, laid out as its convolution reads it; its margins, if it has any, are zero."""
        history = conv.history if history is None else history
        way, (rows, columns) = self._way(conv, shape, like, history)
        b, c, t, h, w = shape
        size = (b, c, history + t, h + sum(rows), w + sum(columns))
        if way.relaid is not None:
            data = dense(size, like)
        elif len(conv.kernel) == 3:
            data = like.new_empty(size)
        else:
            data = like.new_empty((b, size[2], c, *size[3:])).permute(0, 2, 1, 3, 4)
        window = Window(conv, data, history, rows, columns, self.split)
        zero_margins(window)
        return window

    def _way(self, conv: Conv, shape: tuple[int, ...], like: torch.Tensor, history: int) -> tuple[Way, _Margins]:
        """The way in which a window of own values of `shape` is convolved, and its margins of rows and columns."""
        key = (conv, shape, history)  # asked for twice a window: kept, for small videos wait for the host
        if key not in self._ways:
            self._ways[key] = self._find_way(conv, shape, like, history)
        return self._ways[key]

    def _find_way(self, conv: Conv, shape: tuple[int, ...], like: torch.Tensor, history: int) -> tuple[Way, _Margins]:
        around = rows, columns = margins(conv, self.split)
        video = len(conv.kernel) == 3
        b, c, t, h, w = shape
        height, width, frames = h + sum(rows), w + sum(columns), history + t
        padding = (conv.halo[0] - rows[0], conv.halo[0] - columns[0])
        read = (b, c, frames, height, width) if video else (b * frames, c, height, width)
        # Too few frames for an output: they are only kept as the past of others.
        way = FRAMEWORK if video and frames < conv.kernel[0] else self.checks.ways.of(conv, read, padding, like)
        explicit = video and self.split is None and way.relaid is None and way.padded
        return way, margins(conv, self.split, explicit=True) if explicit else around


def _convolve(
    way: Way, conv: Conv, x: torch.Tensor, padding: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    module = conv.current()
    return way(x, module.weight, module.bias, module.stride, padding)


def _sum_place(x: Pending) -> torch.Tensor:
    """The place for the sum, laid out as the framework has it: into main, if that lies so."""
    main = x.like()
    if x.strides is None or x.strides == main.stride():
        return main
    return torch.empty_strided(main.shape, x.strides, dtype=main.dtype, device=main.device)
