"""Predicted bytes of graphs small enough to count by hand: 5 rows, 5 columns, 2 latent frames of 8 channels."""

from __future__ import annotations

import pytest
from torch import nn

from wanshim.core.decoding.memory import Extent, working_bytes
from wanshim.core.decoding.model.encoder_graph import Downsample, DownStage, EncoderGraph
from wanshim.core.decoding.model.graph import Attention, Conv, DecoderGraph, Norm, ResBlock, Stage, Upsample

NORM = Norm(module=nn.Identity(), scale=1.0, eps=0.0)
EXTENT = Extent(batch=1, frames=2, chunk=2, height=5, width=5, first=False)
TWO_CHUNKS = Extent(batch=1, frames=4, chunk=2, height=5, width=5, first=False)


def conv(given: int, made: int, name: str = "", *, time_only: bool = False) -> Conv:
    kernel = (3, 1, 1) if time_only else 3
    return Conv(name=name or f"{given} to {made}", module=nn.Conv3d(given, made, kernel, device="meta"))


def graph(*middle: ResBlock | Attention, stage: Stage | None = None, last: int = 8) -> DecoderGraph:
    return DecoderGraph(
        name="by hand",
        post_quant=conv(4, 4),
        conv_in=conv(4, 8, "in"),
        middle=middle,
        stages=() if stage is None else (stage,),
        norm_out=NORM,
        conv_out=conv(last, 3, "out"),
    )


def block(given: int, made: int) -> ResBlock:
    shortcut = None if given == made else conv(given, made, "shortcut")
    return ResBlock(
        norm1=NORM, conv1=conv(given, made, "first"), norm2=NORM, conv2=conv(made, made, "second"), shortcut=shortcut
    )


ATTENTION = Attention(norm=NORM, qkv=conv(8, 24), proj=conv(8, 8))
UP = Upsample(
    resize=nn.Identity(),
    conv=Conv(name="up", module=nn.Conv2d(8, 4, 3, device="meta")),
    time_conv=conv(8, 16, "time", time_only=True),
)


@pytest.mark.parametrize(
    ("extent", "passes", "itemsize", "values"),
    [
        (EXTENT, "fast", 2, 8 * 2 * 25 + 8 * 25 * (2 + 2)),  # the norm's input and the window of the last convolution
        (EXTENT, "fast", 4, 8 * 2 * 25 + 8 * 25 * (2 + 2)),
        (Extent(batch=3, frames=2, chunk=2, height=5, width=5, first=True), "fast", 2, 3 * (400 + 800)),
        (
            Extent(batch=1, frames=2, chunk=2, height=5, width=5, first=True, halo_rows=True),
            "fast",
            2,
            400 + 800 * 7 // 5,
        ),
        (
            Extent(batch=1, frames=2, chunk=2, height=5, width=6, first=True, halo_columns=True),
            "fast",
            2,
            480 + 8 * 160,
        ),
        # the last convolution: windows with halo (7 by 7), its output, and both laid out anew for one chunk
        (TWO_CHUNKS, "strict", 2, 8 * 49 * 8 + 150 + 8 * 49 * 8 // 2 + 150),
        (TWO_CHUNKS, "strict_cuda", 2, 8 * 25 * 8 + 150 + 8 * 25 * 8 // 2 + 150),
    ],
)
def test_peak_is_that_of_the_tensors_that_are_alive_together(
    extent: Extent, passes: str, itemsize: int, values: int
) -> None:
    assert working_bytes(graph(), extent, itemsize, passes, keeps_history=False) == values * itemsize


def test_norm_of_one_strict_frame_holds_copies_in_fp32() -> None:
    one = Extent(batch=1, frames=1, chunk=1, height=50, width=50, first=True)
    half, full = (working_bytes(graph(last=8), one, size, "strict", keeps_history=False) for size in (2, 4))
    window, made = 8 * 52 * 52 * 3, 3 * 2500
    assert half == full // 2 == 2 * 2 * (window + made)  # the convolution takes more than 1 + 2 * 2 copies of the norm


def test_history_adds_two_frames_of_each_causal_window() -> None:
    without, kept = (working_bytes(graph(), EXTENT, 2, "fast", keeps_history=keeps) for keeps in (False, True))
    assert kept - without == 2 * (2 * 4 * 25 + 2 * 8 * 25)


@pytest.mark.parametrize(
    ("built", "values"),
    [
        (graph(block(8, 8)), 400 + 400 + 800),  # residual, and the first convolution's output and window
        (graph(block(8, 16), last=16), 800 + 800 + 1600),
        (graph(ATTENTION), 400 + 6 * 400),
        (graph(stage=Stage(blocks=(), upsample=UP, duplicate=None), last=4), 8 * 100 * 4 + 4 * 4 * 100),
    ],
    ids=["block", "block with shortcut", "attention", "upsampler"],
)
def test_each_part_of_a_network_adds_what_it_holds(built: DecoderGraph, values: int) -> None:
    assert working_bytes(built, EXTENT, 2, "fast", keeps_history=False) == 2 * values


DOWN = Downsample(
    conv=Conv(name="down", module=nn.Conv2d(8, 4, 3, stride=2, device="meta")),
    time_conv=Conv(name="time", module=nn.Conv3d(4, 4, (3, 1, 1), stride=(2, 1, 1), device="meta")),
)


@pytest.mark.parametrize(
    ("extent", "passes", "values"),
    [
        (EXTENT, "fast", 8 * 4 * 100 + 8 * 11 * 11 * 4),  # what the downsampler reads, and its window of one row more
        # the window of two chunks, what a chunk makes of it, and both laid out anew for one chunk
        (TWO_CHUNKS, "strict_cuda", 8 * 11 * 11 * 8 + 400 + 8 * 11 * 11 * 8 // 2 + 400),
    ],
)
def test_encode_counts_pictures_and_frames_before_they_are_halved(extent: Extent, passes: str, values: int) -> None:
    encoder = EncoderGraph(
        name="by hand",
        conv_in=conv(3, 8, "in"),
        stages=(DownStage(blocks=(), downsample=DOWN, average=None),),
        middle=(),
        norm_out=NORM,
        conv_out=conv(4, 3, "out"),
        quant=conv(3, 3, "quant"),
    )
    assert working_bytes(encoder, extent, 2, passes, keeps_history=False) == 2 * values
