"""The normal form of the Wan encoder, as `graph.py` has the decoder's.

The first frame of a video is encoded alone, then `scale_t` frames at a time: each chunk gives one latent frame. Two
layouts are known:

- 2.1 (16 latent channels): residual blocks and downsamplers in a row;
- 2.2 (48 latent channels, patch size 2): each stage also adds the averages of its input (`Average`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, TypeAlias

import torch
from torch import nn

from .graph import Coder, Conv, DecoderGraph, Stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Downsample:
    """Halves height and width, and with `time_conv` the frames after the video's first."""

    conv: Conv
    time_conv: Conv | None

    def convs(self) -> tuple[Conv, ...]:
        return (self.conv,) if self.time_conv is None else (self.conv, self.time_conv)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Average:
    """The 2.2 layout's shortcut around a stage: time and space folded into channels, groups averaged (`AvgDown3D`)."""

    module: nn.Module
    factor_t: int
    factor_s: int
    group: int
    out_channels: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderGraph(Coder):
    """A Wan encoder. Its output are mean and logarithm of the variance, [B, 2 Z, T, h, w].

    Args:
        quant: the 1x1x1 convolution on the whole output.
    """

    verb: ClassVar[str] = "encode"
    source: ClassVar[str] = "video"

    stages: tuple[Stage[Downsample, Average], ...]
    quant: Conv

    @property
    def input_channels(self) -> int:
        return self.conv_in.in_channels // self.patch_size**2

    @property
    def input_sizes(self) -> str:
        """The height and width that an input may have, in words."""
        if self._divides:
            return f"height and width multiples of {self.scale_s * self.patch_size}"
        return f"height and width at least {self.scale_s}"

    @property
    def _divides(self) -> bool:
        """Patches and averages take whole blocks of pixels."""
        return self.patch_size > 1 or any(stage.shortcut is not None for stage in self.stages)

    def extent(self, shape: Sequence[int]) -> tuple[int, int, int, int, int]:
        """Batch, channels, frames, height and width of an input, in units of the latent."""
        b, c, t, h, w = shape
        pixels = self.scale_s * self.patch_size
        if self._divides and (h % pixels or w % pixels):
            return b, c, 0, 0, 0
        return b, c, 1 + (t - 1) // self.scale_t, h // pixels, w // pixels

    def cut(self, x: torch.Tensor, dim: int, start: int, stop: int) -> torch.Tensor:
        """The part of an input that latent frames (2), rows (3) or columns (4) `start` to `stop` come from."""
        if dim == 2:
            return x.narrow(2, self.frames(start), self.frames(stop) - self.frames(start))
        pixels = self.scale_s * self.patch_size
        last = stop == x.shape[dim] // pixels  # rows and columns beyond the last latent one are seen by it
        return x.narrow(dim, start * pixels, (x.shape[dim] if last else stop * pixels) - start * pixels)

    def output_shape(self, extent: tuple[int, int, int, int, int]) -> tuple[int, int, int, int, int]:
        b, _, t, h, w = extent
        return b, self.conv_out.out_channels, t, h, w

    @property
    def output_scale(self) -> int:
        """Rows and columns of the output per latent one."""
        return 1

    def output_range(self, start: int, stop: int) -> tuple[int, int]:
        """The frames of the output that latent frames `start` to `stop` give."""
        return start, stop

    def convs(self) -> Iterator[Conv]:
        """Every convolution, in the order of use."""
        return chain((self.conv_in,), self._stage_convs(), self._middle_convs(), (self.conv_out, self.quant))


Graph: TypeAlias = DecoderGraph | EncoderGraph
