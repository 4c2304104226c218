"""Decoder and encoder as generators: they compute, and stop wherever they need what another chunk or rank has.

Both yield a `Window` before each convolution and `Tokens` before each attention. The driver completes the window in
place (or sends the gathered tokens back) and resumes them. Because every mode drives these generators over the same
operators, a faster operator makes all modes faster, and one chunk comes to the same values whoever drives it.

The first frame of a video is special in Wan: resampling in time passes it through. A decoder's history of that
convolution starts with zeros at the second frame, an encoder's with the first frame itself. `first` says that the chunk
begins with it.

`History` keeps, for every causal convolution, the last frames of its input. `run_in_order` is a causal run: chunk
after chunk, each completing its windows from the history (and, sharded in space, from its neighbours).
`run_in_lockstep` advances many chunks of a rank side by side, layer by layer: what a split in time needs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from wanshim.core.decoding.model.graph import (
    Attention,
    Conv,
    DecoderGraph,
    EncoderGraph,
    Graph,
    Norm,
    ResBlock,
    Sampler,
    Stage,
)
from wanshim.core.decoding.operators.base import Operators
from wanshim.core.decoding.operators.window import Pending, Tokens, Window
from wanshim.core.decoding.plan import VaeJob, VaePlan
from wanshim.core.decoding.ranks.exchange import Comm
from wanshim.core.decoding.ranks.output import Finish, Region, Sink

Request: TypeAlias = Window | Tokens
Chunk: TypeAlias = Generator[Request, "torch.Tensor | None", torch.Tensor]
_Part: TypeAlias = Generator[Request, "torch.Tensor | None", Pending]


def encode_chunk(graph: EncoderGraph, ops: Operators, video: torch.Tensor, *, first: bool) -> Chunk:
    """Encode a run of frames [B, C, T, H, W] to [B, 2 Z, t, h, w] (before quant)."""
    window = ops.plain_window(graph.conv_in, patchify(video, graph.patch_size))
    del video
    yield window
    x = ops.conv(window)
    del window
    for stage in graph.stages:
        x = yield from _down_stage(ops, stage, x, first)
    for block in graph.middle:
        x = yield from _block(ops, block, x)
    x = yield from _normed_conv(ops, graph.norm_out, graph.conv_out, x)
    return ops.resolve(x)


def decode_chunk(graph: DecoderGraph, ops: Operators, latent: torch.Tensor, *, first: bool) -> Chunk:
    """Decode a run of latent frames [B, Z, t, h, w] (after post_quant) to patches [B, P, T, H, W] before clamping."""
    window = ops.plain_window(graph.conv_in, latent)
    del latent
    yield window
    x = ops.conv(window)
    del window
    for block in graph.middle:
        x = yield from _block(ops, block, x)
    for stage in graph.stages:
        x = yield from _stage(ops, stage, x, first)
    x = yield from _normed_conv(ops, graph.norm_out, graph.conv_out, x)
    return ops.resolve(x)


def _stage(ops: Operators, stage: Stage, x: Pending, first: bool) -> _Part:
    around = None
    if stage.shortcut is not None:
        around = ops.resolve(x)
        x = Pending(around)
    for block in stage.blocks:
        x = yield from _block(ops, block, x)
        x.shared = x.skip is around
    if stage.sampler is not None:
        x = yield from _upsample(ops, stage.sampler, x, first)
    if stage.shortcut is not None and around is not None:
        x = ops.add_duplicate(stage.shortcut, x, around, first)
    return x


def _block(ops: Operators, block: ResBlock | Attention, x: Pending) -> _Part:
    if isinstance(block, Attention):
        return (yield from _attention(ops, block, x))
    window, skip = ops.normed_window(block.norm1, block.conv1, x, keep=True)
    if block.shortcut is not None and skip is not None:
        skip = ops.pointwise(block.shortcut, skip)
    yield window
    x = ops.conv(window)
    del window
    x = yield from _normed_conv(ops, block.norm2, block.conv2, x)
    x.skip = skip
    return x


def _normed_conv(ops: Operators, norm: Norm, conv: Conv, x: Pending) -> _Part:
    window, _ = ops.normed_window(norm, conv, x, keep=False)
    yield window
    return ops.conv(window)


def _attention(ops: Operators, block: Attention, x: Pending) -> _Part:
    skip = ops.resolve(x)
    queries, tokens = ops.project(block, skip)
    gathered = yield Tokens(block.qkv.name, tokens)
    del tokens
    assert gathered is not None
    return ops.attend(block, queries, gathered, skip)


def _down_stage(ops: Operators, stage: Stage, x: Pending, first: bool) -> _Part:
    around = None
    if stage.shortcut is not None:
        source = ops.resolve(x)
        x, around = Pending(source), ops.average(stage.shortcut, source)
        del source
    for block in stage.blocks:
        x = yield from _block(ops, block, x)
    if stage.sampler is not None:
        x = yield from _downsample(ops, stage.sampler, x, first)
    if around is not None:
        if x.skip is not None:
            x = Pending(ops.resolve(x))
        x.skip = around
    return x


def _downsample(ops: Operators, down: Sampler, x: Pending, first: bool) -> _Part:
    window = ops.summed_window(down.conv, x)
    yield window
    x = ops.conv(window)
    del window
    if down.time_conv is None:
        return x
    window = ops.summed_window(down.time_conv, x, past=not first)
    yield window
    if not first:
        return ops.conv(window)
    lead = window.own()[:, :, :1]
    return ops.join(lead, ops.conv(window)) if window.frames > 1 else Pending(lead)


def _upsample(ops: Operators, upsample: Sampler, x: Pending, first: bool) -> _Part:
    if upsample.time_conv is None:
        window = ops.resized_window(upsample, lead=x, pairs=None)
    else:
        lead = None
        if first:
            past, lead = ops.time_window(upsample.time_conv, x)
        else:
            past = ops.summed_window(upsample.time_conv, x)
        yield past
        pairs = ops.conv(past) if past.frames else None
        del past
        window = ops.resized_window(upsample, lead=lead, pairs=pairs)
    yield window
    return ops.conv(window)


class History:
    """The past of every causal convolution, by name. Zeros at the start of a video."""

    def __init__(self) -> None:
        self._tails: dict[str, torch.Tensor] = {}

    def complete(self, window: Window, *, last: bool) -> None:
        """Fill the window's past and, if another chunk follows, remember its tail."""
        if not window.conv.history:
            return
        before = self._tails.pop(window.conv.name, None)
        if before is None:
            window.past().zero_()
        else:
            window.past().copy_(before)
        del before
        if not last:
            self._tails[window.conv.name] = window.tail().clone()

    def answer(self, request: Request, *, last: bool) -> torch.Tensor | None:
        """The answer of a rank that has all rows and columns."""
        if isinstance(request, Tokens):
            return request.data
        self.complete(request, last=last)
        return None


def drive(chunk: Chunk, answer: Callable[[Request], torch.Tensor | None]) -> torch.Tensor:
    """Run one chunk to its end."""
    reply: torch.Tensor | None = None
    try:
        while True:
            request = chunk.send(reply)
            reply = answer(request)
            del request
    except StopIteration as end:
        value = end.value
        assert isinstance(value, torch.Tensor)
        return value
    finally:
        chunk.close()


def run_in_order(
    steps: Sequence[tuple[int, int]],
    chunk: Callable[[int, int], Chunk],
    answer: Callable[..., torch.Tensor | None],
) -> Iterator[torch.Tensor]:
    """Compute one chunk after the other: those of the latent frames of each step.

    Args:
        answer: answers a request of the network. Nothing follows the `last` chunk, so nothing is kept of it.
    """
    for start, stop in steps:
        yield drive(chunk(start, stop), partial(answer, last=stop == steps[-1][1]))


def run_in_lockstep(chunks: list[Chunk], complete: Callable[[list[Window]], None]) -> list[torch.Tensor]:
    """Advance all chunks from request to request together; `complete` sees the windows of one layer at once."""
    replies: list[torch.Tensor | None] = [None] * len(chunks)
    results: list[torch.Tensor] = []
    while not results:
        requests: list[Request] = []
        for i, chunk in enumerate(chunks):
            try:
                requests.append(chunk.send(replies[i]))
            except StopIteration as end:
                results.append(end.value)
            replies[i] = None
        windows = [request for request in requests if isinstance(request, Window)]
        replies = [request.data if isinstance(request, Tokens) else None for request in requests]
        del requests
        if windows:
            complete(windows)
        del windows
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeRun:
    """One rank's side of a decode or an encode that has been planned.

    Args:
        given: the whole input, on every rank: a latent [B, Z, T, h, w] or a video [B, C, T, H, W].
        sink: where the parts of the output go.
    """

    graph: Graph
    job: VaeJob
    plan: VaePlan
    comm: Comm
    ops: Operators
    given: torch.Tensor
    sink: Sink

    def source(self) -> torch.Tensor:
        """The whole input, as the chunks take parts of it."""
        if isinstance(self.graph, EncoderGraph):
            return self.given
        return self.ops.quant(self.graph.post_quant, self.given)

    def chunk(self, source: torch.Tensor, start: int, stop: int) -> Chunk:
        """Computes latent frames `start` to `stop` of `source`, or of a band of it."""
        part, first = self.graph.cut(source, 2, start, stop), start == 0
        if isinstance(self.graph, EncoderGraph):
            return encode_chunk(self.graph, self.ops, part, first=first)
        return decode_chunk(self.graph, self.ops, part, first=first)

    def close(self) -> torch.Tensor | None:
        """The whole output, on a rank that receives it; contiguous, for callers take views of it."""
        output = self.sink.close()
        if output is None or not isinstance(self.graph, EncoderGraph):
            return output
        return self.ops.quant(self.graph.quant, output).contiguous()

    def whole_picture(self, rank: int) -> Region:
        """All rows and columns, computed by `rank`."""
        height, width = self.graph.output_shape(self.job.latent)[3:]
        return Region(rank=rank, rows=(0, height), columns=(0, width))


def to_frames(graph: DecoderGraph, patches: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Patches as a decoder gives them (overwritten) to frames: clamped as the framework does, unfolded, in `dtype`."""
    if graph.clamped or dtype == torch.uint8:
        patches = patches.clamp_(-1.0, 1.0)
    if dtype == torch.uint8:
        patches = patches.float().add_(1.0).mul_(127.5).round_().to(torch.uint8)
    return unpatchify(patches, graph.patch_size).to(dtype)


def finisher(graph: Graph) -> Finish:
    """From the network's values to those that ranks send each other."""
    return torch.Tensor.to if isinstance(graph, EncoderGraph) else partial(to_frames, graph)


def patchify(x: torch.Tensor, patch: int) -> torch.Tensor:
    """[B, C, T, H * patch, W * patch] to [B, C * patch * patch, T, H, W] (the same if `patch` is 1)."""
    if patch == 1:
        return x
    b, c, t, h, w = x.shape
    x = x.reshape(b, c, t, h // patch, patch, w // patch, patch).permute(0, 1, 6, 4, 2, 3, 5)
    return x.reshape(b, c * patch**2, t, h // patch, w // patch)


def unpatchify(x: torch.Tensor, patch: int) -> torch.Tensor:
    """[B, C * patch * patch, T, H, W] to [B, C, T, H * patch, W * patch] (a view if `patch` is 1)."""
    if patch == 1:
        return x
    b, c, t, h, w = x.shape
    x = x.reshape(b, c // patch**2, patch, patch, t, h, w).permute(0, 1, 4, 5, 3, 6, 2)
    return x.reshape(b, c // patch**2, t, h * patch, w * patch)
