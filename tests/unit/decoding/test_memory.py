"""Predicted bytes of graphs small enough to count by hand: 5 rows, 5 columns, 2 latent frames of 8 channels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from wanshim.core.decoding import memory
from wanshim.core.decoding.memory import Extent, working_bytes
from wanshim.core.decoding.model.graph import (
    Attention,
    Conv,
    DecoderGraph,
    EncoderGraph,
    Graph,
    Norm,
    ResBlock,
    Sampler,
    Shortcut,
    Stage,
)
from wanshim.core.decoding.operators import attention_kernel, winograd

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
UP = Sampler(
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
        (
            graph(stage=Stage(blocks=(), sampler=UP, shortcut=None), last=4),
            2 * 4 * 100 * 4 + 4 * 100 * 6,
        ),  # phases, sum, window
    ],
    ids=["block", "block with shortcut", "attention", "upsampler"],
)
def test_each_part_of_a_network_adds_what_it_holds(built: DecoderGraph, values: int) -> None:
    assert working_bytes(built, EXTENT, 2, "fast", keeps_history=False) == 2 * values


DOWN = Sampler(
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
    encoder = encoder_of(Stage(blocks=(), sampler=DOWN, shortcut=None))
    assert working_bytes(encoder, extent, 2, passes, keeps_history=False) == 2 * values


def encoder_of(stage: Stage, *middle: ResBlock | Attention) -> EncoderGraph:
    return EncoderGraph(
        name="by hand",
        conv_in=conv(3, 8, "in"),
        stages=(stage,),
        middle=middle,
        norm_out=NORM,
        conv_out=conv(4, 3, "out"),
        quant=conv(3, 3, "quant"),
    )


DUPLICATE = Shortcut(module=nn.Identity(), factor_t=2, factor_s=2, group=1, out_channels=4)
AVERAGE = Shortcut(module=nn.Identity(), factor_t=2, factor_s=2, group=1, out_channels=16)
DECODER = graph(
    block(8, 16),
    Attention(norm=NORM, qkv=conv(16, 48), proj=conv(16, 16)),
    block(16, 8),
    stage=Stage(blocks=(block(8, 8),), sampler=UP, shortcut=DUPLICATE),
    last=4,
)
SPACE = Sampler(resize=nn.Identity(), conv=UP.conv, time_conv=None)
PICTURES = graph(stage=Stage(blocks=(block(8, 8),), sampler=SPACE, shortcut=None), last=4)
ENCODER = encoder_of(
    Stage(blocks=(block(8, 8),), sampler=DOWN, shortcut=AVERAGE),
    Attention(norm=NORM, qkv=conv(4, 12), proj=conv(4, 4)),
)
BEGIN = Extent(batch=2, frames=3, chunk=2, height=5, width=4, first=True, halo_rows=True)


@pytest.mark.parametrize(
    ("network", "extent", "itemsize", "passes", "values"),
    [
        (
            DECODER,
            TWO_CHUNKS,
            2,
            "fast",
            "1200 2400 3600 4000 6400 5600 6400 6400 4800 4400 3200 2800 4000 3600 4000 3600 4000 3200 "
            "3200 4000 4000 8000 6000",
        ),
        (
            DECODER,
            TWO_CHUNKS,
            2,
            "strict",
            "3152 3568 5136 4368 7904 8736 12608 6400 8736 7872 7536 11008 4368 6304 5168 7104 5168 "
            "7104 4000 3200 14400 13600 5600 11456 12768",
        ),
        (
            DECODER,
            TWO_CHUNKS,
            4,
            "strict",
            "3152 2768 5136 3568 7904 7136 12608 6400 7136 7872 5936 11008 3568 6304 4368 7104 4368 "
            "7104 4000 3200 8000 13600 5600 8256 12768",
        ),
        (
            DECODER,
            TWO_CHUNKS,
            2,
            "strict_cuda",
            "2000 1600 4000 2400 5600 4800 8000 6400 4800 5600 3600 6400 2400 4000 3200 4800 3200 4800 "
            "4000 3200 8000 13600 2400 5600 9600",
        ),
        (
            DECODER,
            BEGIN,
            2,
            "fast",
            "2208 4096 5696 6336 10112 9472 9600 10112 8512 7872 5056 4736 6016 5696 6016 5696 5120 "
            "4480 4480 5760 6080 10112 8832",
        ),
        (
            DECODER,
            BEGIN,
            2,
            "strict",
            "4808 5552 7264 6512 11536 13024 18592 9600 13024 11648 11584 16352 6512 9296 7472 10256 "
            "7472 10256 5120 4480 21440 17600 8640 17120 16800",
        ),
        (
            PICTURES,
            TWO_CHUNKS,
            2,
            "fast",
            "1200 2400 2800 3200 2800 2000 1600 1600 5600 3800",
        ),
        (
            PICTURES,
            TWO_CHUNKS,
            2,
            "strict",
            "3152 3568 6304 4368 6304 6800 6400 800 6304 8112",
        ),
        (
            ENCODER,
            TWO_CHUNKS,
            2,
            "fast",
            "6800 12800 17600 20800 24000 20800 22144 9744 3400 2800 1600 1600 950",
        ),
        (
            ENCODER,
            TWO_CHUNKS,
            2,
            "strict",
            "14176 12800 24512 35136 30912 35136 18272 14016 2900 3500 1600 2184 2652",
        ),
        (
            ENCODER,
            BEGIN,
            2,
            "strict_cuda",
            "18016 16640 19072 39296 25472 39296 18680 15080 3280 4240 2400 1904 2832",
        ),
        (
            ENCODER,
            BEGIN,
            2,
            "fast",
            "10304 16640 22144 27264 28544 27264 22640 10480 3840 3360 2400 2528 1808",
        ),
    ],
)
def test_values_alive_at_each_operator_are_those_of_its_tensors(
    network: Graph, extent: Extent, itemsize: int, passes: str, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators in the order of the walk, such as the first two of the decoder in fast passes: a window of 4 channels,
    8 frames and 25 pixels with its output of 8 channels and 2 frames; a norm's input of 4 frames with the next window.
    """
    seen: list[int] = []
    see = memory._Walk._see

    def note(walk: memory._Walk, alive: float) -> None:
        seen.append(round(alive + walk.around))
        see(walk, alive)

    monkeypatch.setattr(memory._Walk, "_see", note)
    assert working_bytes(network, extent, itemsize, passes, keeps_history=False) == max(seen) * itemsize
    assert " ".join(map(str, seen)) == values


def test_convolution_that_is_computed_channels_last_is_not_laid_out_anew() -> None:
    def peak(channels_first: list[str] | None) -> int:
        named = {"keeps_history": False, "channels_first": channels_first}
        return working_bytes(graph(), TWO_CHUNKS, 2, "strict_cuda", **named)  # type: ignore[arg-type]

    last = 8 * 25 * 8 + 150  # its window and output, which are laid out so from the start
    assert peak([]) == 2 * last
    assert peak(["in"]) == 2 * (800 + 400 + 400 + 400)  # the first convolution's window and output, and both anew
    assert peak(["out"]) == peak(None) == 2 * (last + 8 * 25 * 8 // 2 + 150)


def test_shortcut_of_a_strict_block_on_cuda_counts_its_input_laid_out_anew() -> None:
    one = Extent(batch=1, frames=1, chunk=1, height=50, width=50, first=True)
    built = graph(block(64, 8), last=8)
    plain = working_bytes(built, one, 2, "fast", keeps_history=False)
    relaid = working_bytes(built, one, 2, "strict_cuda", keeps_history=False, channels_first=[])
    assert relaid - plain == 2 * 8 * 2500  # conv_in gives 8 channels


def test_attention_of_a_wide_head_adds_its_scores_and_weights_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(side: int) -> int:
        extent = Extent(batch=1, frames=2, chunk=2, height=side, width=side, first=False)
        return working_bytes(graph(ATTENTION), extent, 2, "strict", keeps_history=False)

    alone, large = peak(5), peak(32)
    monkeypatch.setattr(attention_kernel, "_STORED_FROM", 8)
    assert peak(5) == max(alone, 2 * (400 + 6 * 400 + 2 * 2 * 25 * 25))
    others = 8 * 2 * 1024 * 7
    assert peak(32) == max(large, 2 * (others + 2 * 2 * 1024 * 1024))
    monkeypatch.setattr(attention_kernel, "_MOST_SCORES", 2**19)  # of two frames 256 queries each at once
    assert peak(32) == max(large, 2 * (others + 2 * 2 * 256 * 1024))


def test_winograd_takes_buffers_and_the_weights_of_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "_CHANNELS", 8)  # the convolutions "first" and "second"
    extent = Extent(batch=1, frames=9, chunk=8, height=5, width=5, first=True)
    built = graph(block(8, 8))

    def peak(itemsize: int = 2, passes: str = "fast", frames: int = 8, by_winograd: bool = True) -> int:
        taken = replace(extent, chunk=frames)
        return working_bytes(built, taken, itemsize, passes, keeps_history=False, by_winograd=by_winograd)

    buffers, weights = 7 * 2 * 8 * 25, 2 * 6 * 9 * 8 * 8  # eight frames at once
    read = 1800 + 2 * 8 * 25 * (2 * 2 + 9)  # the residual; the second window of two chunks and that which reads it
    assert peak() == 2 * (read + buffers + weights)
    beside = replace(extent, halo_rows=True)  # others wait for rows of each frame: the output is computed whole
    window, buffers = 8 * (5 + 2) * 5, 7 * 2 * 8 * (5 + 2) * 5
    whole = working_bytes(built, beside, 2, "fast", keeps_history=False, by_winograd=True)
    assert whole == 2 * (2 * 1800 + window * (2 * 2 + 9) + buffers + weights)  # residual, window, buffers, output
    assert peak(frames=2) == peak(frames=2, by_winograd=False) + 2 * weights  # two frames go the direct way
    for other in ({"itemsize": 4}, {"passes": "strict_cuda"}):
        assert peak(**other) == peak(**other, by_winograd=False)  # type: ignore[arg-type]
