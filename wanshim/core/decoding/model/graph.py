"""The normal form of Wan's decoder and encoder: which module does what, by reference, in the order the data meets them.

An adapter builds a graph from the modules of its framework. Nothing is copied: weights are read from the modules when
they are used, so moving, casting or replacing them keeps working. Two layouts are known:

- 2.1 (16 latent channels): residual blocks and samplers in a row;
- 2.2 (48 latent channels, patch size 2): each stage also adds a duplicated copy of a decoder's input, or the averages
  of an encoder's (`Shortcut`).

The first frame of a video is encoded alone, then `scale_t` frames at a time: each chunk gives one latent frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, TypeAlias

import torch
from torch import nn

from .framework import Framework


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conv:
    """A convolution of a VAE: causal in time (Conv3d) or per frame (Conv2d), zero-padded in space.

    Args:
        name: its path in the graph, for messages.
        module: the framework's module; its `weight` and `bias` are used, its `forward` is not.
        resolve: returns the module to use now, where a framework keeps weights elsewhere between calls.
    """

    name: str
    module: nn.Module
    resolve: Callable[[], nn.Module] | None = None

    def current(self) -> nn.Module:
        return self.module if self.resolve is None else self.resolve()

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.module.kernel_size)

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(self.module.stride)

    @property
    def in_channels(self) -> int:
        return int(self.module.in_channels)

    @property
    def out_channels(self) -> int:
        return int(self.module.out_channels)

    @property
    def history(self) -> int:
        """The number of frames before its own that the convolution reads."""
        return self.kernel[0] - self.stride[0] if len(self.kernel) == 3 else 0

    @property
    def halo(self) -> tuple[int, int]:
        """The number of rows, and of columns, that the convolution reads before and after its own."""
        outside = self.kernel[-1] - self.stride[-1]
        return (0, outside) if self.stride[-1] > 1 else (outside // 2, outside // 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """RMS norm over channels, `x / max(|x|, eps) * scale * gamma + bias`; `module` rounds as the framework does."""

    module: nn.Module
    scale: float
    eps: float

    @property
    def gamma(self) -> torch.Tensor:
        return self.module.gamma.reshape(-1)

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self.module.bias
        return bias.reshape(-1) if isinstance(bias, torch.Tensor) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResBlock:
    """norm, SiLU, conv, norm, SiLU, conv, plus the input (through `shortcut` where the width changes)."""

    norm1: Norm
    conv1: Conv
    norm2: Norm
    conv2: Conv
    shortcut: Conv | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Single-head self-attention over all positions of one frame, plus the input."""

    norm: Norm
    qkv: Conv
    proj: Conv


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampler:
    """Doubles height and width in a decoder, halves them in an encoder, and with `time_conv` every frame but the
    video's first.

    Args:
        time_conv: before `conv` in a decoder, behind it in an encoder.
        resize: what enlarges pictures before `conv`; None: an encoder's, whose `conv` strides.
    """

    conv: Conv
    time_conv: Conv | None
    resize: nn.Module | None = None

    def convs(self) -> tuple[Conv, ...]:
        if self.time_conv is None:
            return (self.conv,)
        return (self.conv, self.time_conv) if self.resize is None else (self.time_conv, self.conv)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shortcut:
    """The 2.2 layout's way around a stage. A decoder's repeats channels and unfolds them into time and space
    (`DupUp3D`); an encoder's folds time and space into channels and averages them (`AvgDown3D`).

    Args:
        group: how many channels are made of one, or averaged.
    """

    module: nn.Module
    factor_t: int
    factor_s: int
    group: int
    out_channels: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """Blocks at one resolution, then at most one up- or downsampler; in the 2.2 layout a shortcut around all of it."""

    blocks: tuple[ResBlock | Attention, ...]
    sampler: Sampler | None
    shortcut: Shortcut | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coder:
    """The parts that a decoder and an encoder both have.

    Args:
        name: the class it was built from.
        patch_size: pixels per side that are folded into channels outside of the network (1: none).
        output_dtype: what the framework returns whatever it computes in; None: the dtype it computes in.
        framework: what it was read from; None: modules of no framework.
    """

    name: str
    conv_in: Conv
    middle: tuple[ResBlock | Attention, ...]
    stages: tuple[Stage, ...]
    norm_out: Norm
    conv_out: Conv
    patch_size: int = 1
    output_dtype: torch.dtype | None = None
    framework: Framework | None = None

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.conv_in.current().weight.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    def frames(self, latents: int) -> int:
        """Frames of a video of `latents` latent frames; an encode leaves a video's last ones over, as the frameworks
        do."""
        return 1 + (latents - 1) * self.scale_t if latents else 0

    @property
    def samplers(self) -> list[Sampler]:
        """The modules that halve or double the picture."""
        return [stage.sampler for stage in self.stages if stage.sampler is not None]

    @property
    def scale_s(self) -> int:
        """Rows and columns of the network's pixels (a decoder's outputs, an encoder's inputs) per latent one."""
        return int(2 ** len(self.samplers))

    @property
    def scale_t(self) -> int:
        """Frames per latent frame, for every latent frame but the first."""
        return int(2 ** sum(sampler.time_conv is not None for sampler in self.samplers))

    def _middle_convs(self) -> Iterator[Conv]:
        return chain.from_iterable(map(block_convs, self.middle))

    def _stage_convs(self) -> Iterator[Conv]:
        for stage in self.stages:
            yield from chain.from_iterable(map(block_convs, stage.blocks))
            if stage.sampler is not None:
                yield from stage.sampler.convs()

    def norms(self) -> Iterator[Norm]:
        for block in (*self.middle, *(block for stage in self.stages for block in stage.blocks)):
            yield from block_norms(block)
        yield self.norm_out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderGraph(Coder):
    """A Wan decoder.

    Args:
        post_quant: the 1x1x1 convolution on the latent.
        clamped: the framework limits its frames to -1..1.
    """

    verb: ClassVar[str] = "decode"
    source: ClassVar[str] = "latent"

    post_quant: Conv
    clamped: bool = True

    @property
    def input_channels(self) -> int:
        return self.post_quant.in_channels

    @property
    def input_sizes(self) -> str:
        """The height and width that an input may have, in words."""
        return "none of them 0"

    def extent(self, shape: Sequence[int]) -> tuple[int, int, int, int, int]:
        """Batch, channels, frames, height and width of an input, in units of the latent."""
        b, c, t, h, w = shape
        return b, c, t, h, w

    def cut(self, x: torch.Tensor, dim: int, start: int, stop: int) -> torch.Tensor:
        """The part of an input that latent frames (2), rows (3) or columns (4) `start` to `stop` come from."""
        return x.narrow(dim, start, stop - start)

    def output_shape(self, extent: tuple[int, int, int, int, int]) -> tuple[int, int, int, int, int]:
        b, _, t, h, w = extent
        channels = self.conv_out.out_channels // self.patch_size**2
        return b, channels, self.frames(t), h * self.output_scale, w * self.output_scale

    @property
    def output_scale(self) -> int:
        """Rows and columns of the output per latent one."""
        return self.scale_s * self.patch_size

    def output_range(self, start: int, stop: int) -> tuple[int, int]:
        """The frames of the output that latent frames `start` to `stop` give."""
        return self.frames(start), self.frames(stop)

    def convs(self) -> Iterator[Conv]:
        """Every convolution, in the order of use."""
        return chain((self.post_quant, self.conv_in), self._middle_convs(), self._stage_convs(), (self.conv_out,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderGraph(Coder):
    """A Wan encoder. Its output are mean and logarithm of the variance, [B, 2 Z, T, h, w].

    Args:
        quant: the 1x1x1 convolution on the whole output.
    """

    verb: ClassVar[str] = "encode"
    source: ClassVar[str] = "video"

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


def block_norms(block: ResBlock | Attention) -> tuple[Norm, ...]:
    return (block.norm,) if isinstance(block, Attention) else (block.norm1, block.norm2)


def block_convs(block: ResBlock | Attention) -> Iterator[Conv]:
    if isinstance(block, Attention):
        yield from (block.qkv, block.proj)
        return
    if block.shortcut is not None:
        yield block.shortcut
    yield from (block.conv1, block.conv2)
