"""How much memory a decode will take, from the tensors that are alive together at each operator.

The model walks the graph with the shapes of one chunk and adds up what lives at the same time: residual, window and
output of a convolution, the larger window behind an upsampler, the kept frames of every causal convolution, the
output. It counts bytes on top of what is allocated before the decode.
"""

from __future__ import annotations

from dataclasses import dataclass

from .graph import Attention, Conv, DecoderGraph, ResBlock, Upsample


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What one rank decodes at once: batch, latent frames (`first`: with the video's first), rows, columns.

    `halo_rows` and `halo_columns` are the rows and columns added around each window.
    """

    batch: int
    frames: int
    height: int
    width: int
    first: bool
    halo_rows: int = 0
    halo_columns: int = 0


# A strict norm in 16 bit holds, beside its input, the fp32 input, the fp32 quotient and the rounded result.
_STRICT_NORM_16 = 5.0
_STRICT_NORM_32 = 3.0


def working_bytes(graph: DecoderGraph, extent: Extent, itemsize: int, *, strict: bool, keeps_history: bool) -> int:
    """Peak bytes of decoding one chunk, with the history of the chunks before it."""
    walk = _Walk(graph, extent, itemsize, strict)
    return walk.peak() + (walk.history() if keeps_history else 0)


class _Walk:
    """Shapes along the graph; every number is in values of one activation dtype until `peak` makes bytes of it."""

    def __init__(self, graph: DecoderGraph, extent: Extent, itemsize: int, strict: bool) -> None:
        self.graph, self.extent, self.itemsize, self.strict = graph, extent, itemsize, strict
        self.lead = 1 if extent.first else 0
        self.frames = extent.frames
        self.scale = 1
        self.around = 0.0
        self.most = 0.0
        self.kept = 0.0
        self._seen: set[str] = set()

    def peak(self) -> int:
        graph = self.graph
        x = self._size(graph.conv_in.out_channels)
        self._see(self._window(graph.conv_in) + x)
        for block in graph.middle:
            x = self._block(block, x)
        for stage in graph.stages:
            self.around = x if stage.duplicate is not None else 0.0
            for block in stage.blocks:
                x = self._block(block, x)
            if stage.upsample is not None:
                x = self._upsample(stage.upsample, x)
                self._see(x + self.around)
            self.around = 0.0
        window = self._window(graph.conv_out)
        self._see(2 * x + window + self._norm_extra(x))
        self._see(window + 3 * self._size(graph.conv_out.out_channels))
        return int(self.most * self.itemsize)

    def history(self) -> int:
        return int(self.kept * self.itemsize)

    def _block(self, block: ResBlock | Attention, x: float) -> float:
        if isinstance(block, Attention):
            self._see(x * 6)  # input, normed, queries, keys, values, result
            return x
        out = self._size(block.conv1.out_channels)
        self._see(2 * x + self._window(block.conv1) + self._norm_extra(x))
        skip = out if block.shortcut is not None else x
        self._see(skip + self._window(block.conv1) + out)
        self._see(skip + out + self._window(block.conv2) + self._norm_extra(out))
        self._see(skip + self._window(block.conv2) + out)
        return out

    def _upsample(self, up: Upsample, x: float) -> float:
        if up.time_conv is not None:
            window = self._window(up.time_conv)
            pairs = self._size(up.time_conv.out_channels)
            self._see(2 * x + window)
            self._see(window + pairs)
            source = pairs
            self.frames = 2 * self.frames - self.lead
        else:
            source = 2 * x
        self.scale *= 2
        large = self._size(up.conv.in_channels)
        self._see(source + (large * (1 + 4 / self.itemsize) if self.strict else self._window(up.conv)))
        out = self._size(up.conv.out_channels)
        self._see(self._window(up.conv) + out)
        return out

    def _window(self, conv: Conv) -> float:
        extent = self.extent
        always = self.strict and len(conv.kernel) == 3
        rows = conv.reach if always or extent.halo_rows else 0
        columns = conv.reach if always or extent.halo_columns else 0
        height, width = extent.height * self.scale + 2 * rows, extent.width * self.scale + 2 * columns
        frame = extent.batch * conv.in_channels * height * width
        self._keep(conv, frame)
        return float(frame * (conv.history + self.frames))

    def _keep(self, conv: Conv, frame: int) -> None:
        if conv.history and conv.name not in self._seen:
            self._seen.add(conv.name)
            self.kept += conv.history * frame

    def _norm_extra(self, x: float) -> float:
        if not self.strict:
            return 0.0
        return x * (_STRICT_NORM_16 if self.itemsize == 2 else _STRICT_NORM_32)

    def _size(self, channels: int) -> float:
        extent = self.extent
        pixels = extent.height * extent.width * self.scale**2
        return float(extent.batch * channels * self.frames * pixels)

    def _see(self, values: float) -> None:
        self.most = max(self.most, values + self.around)
