"""Decoder and encoder as generators: they compute, and stop wherever they need what another chunk or rank has.

Both yield a `Window` before each convolution and `Tokens` before each attention. The driver completes the window in
place (or sends the gathered tokens back) and resumes them. Because every mode drives these generators over the same
operators, a faster operator makes all modes faster, and one chunk comes to the same values whoever drives it.

The first frame of a video is special in Wan: resampling in time passes it through. A decoder's history of that
convolution starts with zeros at the second frame, an encoder's with the first frame itself. `first` says that the chunk
begins with it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias

import torch

from wanshim.core.decoding.model.encoder_graph import Downsample, DownStage, EncoderGraph, Graph
from wanshim.core.decoding.model.graph import Attention, Conv, DecoderGraph, Norm, ResBlock, Stage, Upsample
from wanshim.core.decoding.operators.base import Operators
from wanshim.core.decoding.operators.layout import patchify
from wanshim.core.decoding.operators.window import Pending, Tokens, Window

Request: TypeAlias = Window | Tokens
Chunk: TypeAlias = Generator[Request, "torch.Tensor | None", torch.Tensor]
_Part: TypeAlias = Generator[Request, "torch.Tensor | None", Pending]


def run_chunk(graph: Graph, ops: Operators, x: torch.Tensor, *, first: bool) -> Chunk:
    """Decode or encode a run of frames, as `graph` says."""
    if isinstance(graph, EncoderGraph):
        return encode_chunk(graph, ops, x, first=first)
    return decode_chunk(graph, ops, x, first=first)


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
    if stage.duplicate is not None:
        around = ops.resolve(x)
        x = Pending(around)
    for block in stage.blocks:
        x = yield from _block(ops, block, x)
        x.shared = x.skip is around
    if stage.upsample is not None:
        x = yield from _upsample(ops, stage.upsample, x, first)
    if stage.duplicate is not None and around is not None:
        x = ops.add_duplicate(stage.duplicate, x, around, first)
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


def _down_stage(ops: Operators, stage: DownStage, x: Pending, first: bool) -> _Part:
    around = None
    if stage.average is not None:
        source = ops.resolve(x)
        x, around = Pending(source), ops.average(stage.average, source)
        del source
    for block in stage.blocks:
        x = yield from _block(ops, block, x)
    if stage.downsample is not None:
        x = yield from _downsample(ops, stage.downsample, x, first)
    if around is not None:
        if x.skip is not None:
            x = Pending(ops.resolve(x))
        x.skip = around
    return x


def _downsample(ops: Operators, down: Downsample, x: Pending, first: bool) -> _Part:
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


def _upsample(ops: Operators, upsample: Upsample, x: Pending, first: bool) -> _Part:
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
