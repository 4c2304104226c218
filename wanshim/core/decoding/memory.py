"""The memory that a decode or an encode will take, from the tensors that are alive together at each operator.

The model walks the graph with the shapes of one rank and adds up what lives at the same time: residual, window and
output of a convolution, what an up- or downsampler adds, the kept frames of every causal convolution. What a
whole run holds between layers (split in time) is counted apart from what one chunk needs while it computes. It counts
bytes on top of what is allocated before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from wanshim.core.decoding.model.graph import (
    Attention,
    Conv,
    DecoderGraph,
    EncoderGraph,
    Graph,
    ResBlock,
    Sampler,
    Shortcut,
)
from wanshim.core.decoding.operators import attention_kernel, winograd


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The part that one rank computes: batch, latent frames held at once, latent frames computed at once, rows,
    columns.

    Args:
        first: the frames held begin with the video's first.
        halo_rows, halo_columns: windows carry a neighbour's rows or columns.
    """

    batch: int
    frames: int
    chunk: int
    height: int
    width: int
    first: bool
    halo_rows: bool = False
    halo_columns: bool = False


def working_bytes(
    graph: Graph,
    extent: Extent,
    itemsize: int,
    passes: str,
    *,
    keeps_history: bool,
    channels_first: Collection[str] | None = None,
    by_winograd: bool = False,
) -> int:
    """Peak bytes of computing what `extent` says; with `keeps_history` after chunks before it.

    Args:
        passes: which operators: strict (`StrictOperators`), strict_cuda (`StrictCudaOperators`) or fast
            (`FastOperators`).
        channels_first: the convolutions that strict operators do not compute channels last; None: all.
        by_winograd: fast operators compute 16-bit convolutions by Winograd's method; each that can is taken to do so.
    """
    kind = _EncoderWalk if isinstance(graph, EncoderGraph) else _DecoderWalk
    walk: Any = kind(extent, itemsize, passes, channels_first, by_winograd)
    values = walk.peak(graph)
    return int((values + (walk.kept if keeps_history else 0.0)) * itemsize)


class _Walk:
    """Shapes along the graph; every number counts values of the activation dtype."""

    def __init__(
        self, extent: Extent, itemsize: int, passes: str, channels_first: Collection[str] | None, by_winograd: bool
    ) -> None:
        self.extent = extent
        self.strict, self.apart = passes == "strict", passes != "fast"  # apart: chunk after chunk, its values its own
        self.channels_first = channels_first
        self.by_winograd = by_winograd and passes == "fast" and itemsize == 2
        self.lead = 1 if extent.first else 0
        self.held, self.step = extent.frames, min(extent.chunk, extent.frames)
        self.chunks = -(-extent.frames // max(extent.chunk, 1))
        self.wide = 4 // itemsize if itemsize < 4 else 0  # an fp32 copy, in values of a 16-bit dtype
        self.scale = 1
        self.around = self.most = self.kept = self.split = 0.0  # split: weights of Winograd's products, so far
        self.skip = self.phases = 0.0  # phases: of an upsampling, beside the sum that the next operator makes of them
        self.unread = 0.0  # of an output that is computed when it is read: its window, and the buffers
        self._seen: set[str] = set()

    def _block(self, block: ResBlock | Attention, x: int) -> int:
        if isinstance(block, Attention):
            extent, tokens = self.extent, self.extent.height * self.extent.width * self.scale**2
            scores = attention_kernel.stored_values(extent.batch * self.step, tokens, tokens, x)
            self._see(self._run(x) + 6 * self._chunk(x) + scores)  # normed, queries, keys, values, result, projection
            self.skip = self._run(x)
            return x
        out = block.conv1.out_channels
        self._normed(block.conv1, x, self.skip)
        kept = self._run(x)
        if block.shortcut is not None:
            relaid = 0.0 if self.strict or not self.apart else self._chunk(x)
            self._see(self._chunk(x) + self._window(block.conv1) + self._run(out) + relaid)
            if self.apart:  # the last chunk's norm, beside what the others hold already
                others = (self._window(block.conv1) + self._run(out)) * self.others
                self._see(others + self._chunk(x) * self._norm_copies)
            kept = self._run(out)
        self._convolution(block.conv1, kept)
        self._normed(block.conv2, out, kept)
        self._convolution(block.conv2, kept)
        self.skip = kept
        return out

    def _normed(self, conv: Conv, x: int, skip: float) -> None:
        """From a sum of `x` channels and a residual to the window of `conv`."""
        if self.apart:
            self._see(skip + self._window(conv) * self.others + self._chunk(x) * self._norm_copies)
        else:
            if self.unread and (self.extent.halo_rows or self.extent.halo_columns):  # computed before it is read
                self._see(skip + self._read(0.0) + self._run(x))
            self._see(skip + self._read(self._run(x)) + self.phases + self._window(conv))
            self.phases = 0.0

    def _last(self, conv: Conv, x: int) -> float:
        """The peak of the whole walk, which `conv` ends."""
        self._normed(conv, x, self.skip)
        self._convolution(conv, 0.0)
        if self.unread:
            self._see(self._chunk(conv.out_channels) + self._read(0.0))
        return self.most

    def _convolution(self, conv: Conv, kept: float) -> None:
        self._convolved(conv, self._window(conv), self._chunk(conv.out_channels), kept)

    def _convolved(self, conv: Conv, window: float, out: float, kept: float) -> None:
        # cuDNN computes channels last: it lays the input and the output of a channels-first convolution out anew.
        anew = self.apart and (self.channels_first is None or conv.name in self.channels_first)
        relaid = window / max(self.chunks, 1) + out if anew else 0.0
        buffers = self._buffers(conv)
        if buffers:
            self.unread = window + buffers
        else:
            self._see(kept + window + out + relaid)

    def _read(self, output: float) -> float:
        """Bytes that the last convolution holds while its `output` is read; the sum goes where the residual was."""
        unread, self.unread = self.unread, 0.0
        return max(unread, output)  # it may turn out to be computed directly

    def _buffers(self, conv: Conv) -> float:
        """Bytes that a convolution by Winograd's method takes beside its input and output."""
        if not self.by_winograd or not winograd.applies(conv):
            return 0.0
        self.split += winograd.weight_values(conv)
        extent = self.extent
        height = extent.height * self.scale + sum(conv.halo) * extent.halo_rows
        width = extent.width * self.scale + sum(conv.halo) * extent.halo_columns
        channels = (conv.in_channels, conv.out_channels)
        return float(winograd.buffer_values(min(self.step, self.held), extent.batch, height, width, channels))

    def _window(self, conv: Conv) -> float:
        """All windows of one layer that are alive together."""
        extent = self.extent
        always = (self.strict and len(conv.kernel) == 3) or conv.halo[0] != conv.halo[1]
        rows = sum(conv.halo) if always or extent.halo_rows else 0
        columns = sum(conv.halo) if always or extent.halo_columns else 0
        height, width = extent.height * self.scale + rows, extent.width * self.scale + columns
        frame = extent.batch * conv.in_channels * height * width
        if conv.history and conv.name not in self._seen:
            self._seen.add(conv.name)
            self.kept += conv.history * frame
        return float(frame * (conv.history * self.chunks + self.held))

    @property
    def _norm_copies(self) -> int:
        """The number of times that a norm holds its values: what it was given, and what it makes on the way."""
        return 1 + 2 * max(self.wide, 1) if self.strict else 2

    @property
    def others(self) -> float:
        """The part of a run that is not the chunk at work, from 0 to 1."""
        return (self.chunks - 1) / self.chunks if self.chunks else 0.0

    def _run(self, channels: int) -> float:
        return self._size(channels, self.held)

    def _chunk(self, channels: int) -> float:
        return self._size(channels, self.step)

    def _size(self, channels: int, frames: int) -> float:
        extent = self.extent
        return float(extent.batch * channels * frames * extent.height * extent.width * self.scale**2)

    def _see(self, values: float) -> None:
        self.most = max(self.most, values + self.around + self.split)


class _DecoderWalk(_Walk):
    def peak(self, graph: DecoderGraph) -> float:
        x = graph.conv_in.out_channels
        self._convolution(graph.conv_in, 0.0)
        for block in graph.middle:
            x = self._block(block, x)
        for stage in graph.stages:
            self.around = self._run(x) if stage.shortcut is not None else 0.0
            for block in stage.blocks:
                x = self._block(block, x)
            if stage.sampler is not None:
                x = self._upsample(stage.sampler, x)
                self._see(self._chunk(x) * (3 if self.strict and self.around else 1) + self.phases)
                if self.around:
                    self.phases = 0.0
            self.around = 0.0
        return self._last(graph.conv_out, x)

    def _upsample(self, up: Sampler, x: int) -> int:
        source = self._read(self._chunk(x))
        if up.time_conv is not None:
            self._see(self.skip + max(source, self._run(x)) + self._window(up.time_conv))
            source = self._chunk(up.time_conv.out_channels)
            self._see(self._window(up.time_conv) + source)
            self.held = 2 * self.held - self.lead
            self.step = min(2 * self.step, self.held)
        elif not self.strict:
            source += self.skip
        small = self._window(up.conv)
        self.scale *= 2
        if self.apart:
            window = self._window(up.conv)
            large = self._chunk(up.conv.in_channels) * (1 + self.wide)
            self._see(source + (window * self.others + large if self.strict else window))
            self._convolution(up.conv, 0.0)
        else:
            out = self._chunk(up.conv.out_channels)
            self._see(source + small)
            self._see(small + out)
            self.phases = out
        self.skip = 0.0
        return up.conv.out_channels


class _EncoderWalk(_Walk):
    def peak(self, graph: EncoderGraph) -> float:
        self.scale = graph.scale_s
        self.held = (self.held - self.lead) * graph.scale_t + self.lead
        self.step = min(self.step * graph.scale_t, self.held)
        x = graph.conv_in.out_channels
        self._convolution(graph.conv_in, 0.0)
        for stage in graph.stages:
            around = 0.0 if stage.shortcut is None else self._average(stage.shortcut, x)
            self.around = around
            for block in stage.blocks:
                x = self._block(block, x)
            if stage.sampler is not None:
                x = self._downsample(stage.sampler, x)
            self.around, self.skip = 0.0, self.skip + around
        for block in graph.middle:
            x = self._block(block, x)
        return self._last(graph.conv_out, x)

    def _average(self, average: Shortcut, x: int) -> float:
        """The average that a stage keeps of its input until its end."""
        self._see(self.skip + self._run(x) + 2 * self._chunk(x))
        held = -(-self.held // average.factor_t)
        return self._size(average.out_channels, held) / average.factor_s**2

    def _downsample(self, down: Sampler, x: int) -> int:
        out = down.conv.out_channels
        self._summed(down.conv, x, self.skip)
        window = self._window(down.conv)
        self.scale //= 2
        self._convolved(down.conv, window, self._chunk(out), 0.0)
        if down.time_conv is not None:
            self._summed(down.time_conv, out, 0.0)
            window = self._window(down.time_conv)
            self.held = (self.held - self.lead) // 2 + self.lead
            self.step = max(self.step // 2, 1)
            self._convolved(down.time_conv, window, self._chunk(out), 0.0)
        self.skip = 0.0
        return out

    def _summed(self, conv: Conv, x: int, skip: float) -> None:
        """From a sum of `x` channels and a residual to the window of `conv`; apart, a chunk frees its parts."""
        window = self._window(conv)
        self._see(skip + self._read(self._run(x)) + (window / max(self.chunks, 1) if self.apart else window))
