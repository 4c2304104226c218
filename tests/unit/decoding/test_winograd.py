"""Winograd's F(4, 3) in time: the direct convolution's values, as close in 16 bits, in the memory that is predicted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.decoding.ptx import ptx
from wanshim.core.decoding.model.graph import Conv
from wanshim.core.decoding.operators import winograd
from wanshim.core.decoding.operators.base import FastOperators
from wanshim.core.decoding.operators.convolution import Convolution
from wanshim.core.decoding.operators.layout import dense
from wanshim.core.decoding.operators.weights import FastWeights

# Triton decides at import whether it interprets, so the comparison runs in a process of its own.
INTERPRETED = """
import torch
from wanshim.core.decoding.operators import winograd
from wanshim.core.decoding.operators.layout import dense

torch.manual_seed(0)
apart = []
winograd._BLOCK = 64  # several programs, and a rest


class OnGpu(torch.Tensor):
    is_cuda = True


def made(*shape):
    return dense(shape, torch.empty(0)).copy_(torch.randn(shape))


for batch, frames in ((1, 4), (2, 5), (2, 6), (1, 7), (1, 12)):
    groups = (frames + 3) // 4
    whole = made(batch, 6, frames + 5, 5, 7)
    x = whole[:, :, 1 : frames + 3]  # a piece of a longer video
    for on_gpu in (False, True):
        parts = [made(batch, 6, groups, 5, 7) for _ in range(6)]
        winograd.split_into(x.as_subclass(OnGpu) if on_gpu else x, parts)
        apart.append(torch.stack(parts))
    assert torch.allclose(*apart, rtol=0, atol=1e-6), (batch, frames)
    apart.clear()
print("equal")
"""


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return dense(shape, torch.empty(0, dtype=dtype)).copy_(torch.randn(shape, dtype=torch.float64))


def by_winograd(x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int, int]) -> torch.Tensor:
    def product(part: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(F.conv3d(part.double(), weight.double(), None, 1, padding))

    shape = Convolution(weight, (1, 1, 1), padding).output_shape(x)
    products = winograd.Buffers(x, shape).multiply(x, winograd.split_weight(weight), product)
    return products.joined().to(x.dtype)


@pytest.mark.parametrize("frames", [1, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("padding", [(0, 1, 1), (0, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize(("batch", "channels"), [(1, (6, 4)), (2, (3, 8))])
def test_products_sum_up_to_what_the_direct_convolution_gives(
    frames: int, padding: tuple[int, int, int], batch: int, channels: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x, weight = random(batch, channels[0], frames + 2, 5, 6), random(channels[1], channels[0], 3, 3, 3)
    assert torch.allclose(by_winograd(x, weight, padding), F.conv3d(x, weight, None, 1, padding), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *((torch.bfloat16, size) for size in (1e-3, 1.0, 1e4)),
        *((torch.float16, size) for size in (1e-3, 1.0)),  # 10^4 gives results beyond fp16
    ],
)
def test_result_is_as_close_as_the_direct_convolution_in_16_bits(dtype: torch.dtype, size: float) -> None:
    """In bf16 the rounding of the result alone remains; values of 10,000, whose products have 10^6, fit too."""
    torch.manual_seed(0)
    x, weight = random(1, 32, 10, 6, 7, dtype=dtype) * size, random(16, 32, 3, 3, 3, dtype=dtype)
    exact = F.conv3d(x.double(), weight.double(), None, 1, (0, 1, 1))
    direct, found = ((y.double() - exact).norm() for y in (exact.to(dtype), by_winograd(x, weight, (0, 1, 1))))
    assert found < (1.2 if dtype == torch.bfloat16 else 5) * direct


def test_small_weights_keep_their_bits() -> None:
    """A layer of 1024 channels has weights around 0.006: as stored they are still finer than bf16."""
    torch.manual_seed(0)
    weight = (random(8, 64, 3, 3, 3) * 0.006).bfloat16()
    x = random(1, 64, 6, 5, 5, dtype=torch.bfloat16)
    exact = F.conv3d(x.double(), weight.double(), None, 1, (0, 1, 1))
    found = by_winograd(x, weight, (0, 1, 1)).double()
    assert (found - exact).norm() < 1.2 * (exact.bfloat16().double() - exact).norm()


def conv(kernel: tuple[int, ...], stride: tuple[int, ...], given: int, made: int) -> Conv:
    of = nn.Conv3d if len(kernel) == 3 else nn.Conv2d
    return Conv(name="conv", module=of(given, made, kernel, stride, device="meta"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "stride", "given", "made", "expected"),
    [
        ((3, 3, 3), (1, 1, 1), 192, 384, True),
        ((3, 3, 3), (1, 1, 1), 192, 96, True),
        ((3, 3, 3), (1, 1, 1), 192, 64, False),
        ((3, 3, 3), (1, 1, 1), 96, 3, False),
        ((3, 3, 3), (1, 1, 1), 16, 384, False),
        ((3, 3, 3), (1, 1, 1), 132, 132, False),  # cuDNN counts in eights
        ((3, 1, 1), (1, 1, 1), 384, 768, False),
        ((3, 1, 1), (2, 1, 1), 384, 384, False),
        ((3, 3), (1, 1), 192, 96, False),
    ],
)
def test_convolutions_over_three_frames_with_many_channels_can_be_computed_so(
    kernel: tuple[int, ...], stride: tuple[int, ...], given: int, made: int, expected: bool
) -> None:
    assert winograd.applies(conv(kernel, stride, given, made)) is expected


def test_weights_of_the_products_are_as_many_as_predicted() -> None:
    layer = nn.Conv3d(8, 16, 3)
    assert winograd.weight_values(Conv(name="conv", module=layer)) == winograd.split_weight(layer.weight).numel()  # type: ignore[arg-type]


@pytest.mark.parametrize("faster", [True, False])
def test_operators_use_winograd_where_it_is_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "_CHANNELS", 8)
    layer = Conv(name="conv", module=nn.Conv3d(8, 16, 3).to(memory_format=torch.channels_last_3d))  # type: ignore[call-overload]
    graph = SimpleNamespace(convs=lambda: [layer])
    asked: list[torch.Tensor] = []
    deferred = winograd.DeferredOutput(torch.empty(0), torch.Size((1, 16, 5, 6, 7)), torch.empty(0), [])

    def by_winograd(
        x: torch.Tensor, weight: torch.Tensor, split: Callable[[], torch.Tensor], padding: tuple[int, int, int]
    ) -> winograd.DeferredOutput | None:
        asked.append(split())
        assert split() is asked[-1]  # made once a call
        return deferred if faster else None

    x = random(1, 8, 5, 6, 7, dtype=torch.float32)
    with torch.no_grad(), FastWeights(graph, torch.float32) as weights:  # type: ignore[arg-type]
        ops = FastOperators(weights, by_winograd=by_winograd)
        window = ops.plain_window(layer, x)
        window.past().zero_()
        main, bias, _ = ops.conv(window).take()
    if faster:
        assert main is deferred
    else:
        direct = F.conv3d(F.pad(x, (0, 0, 0, 0, 2, 0)), layer.module.weight, None, 1, (0, 1, 1))
        assert torch.allclose(main, direct, atol=1e-5)
    assert bias is not None
    assert len(asked) == 1
    assert torch.equal(asked[0], winograd.split_weight(layer.module.weight))


@pytest.mark.parametrize(
    ("frames", "height", "width", "channels", "groups"),
    [
        (2, 88, 160, (384, 384), 0),  # 6 products either way
        (3, 88, 160, (384, 384), 1),
        (8, 88, 160, (384, 384), 2),  # small: all of them
        (32, 176, 320, (384, 384), 4),  # half of them
        (32, 352, 640, (512, 256), 1),
        (32, 352, 640, (192, 192), 4),
        (32, 704, 1280, (96, 96), 2),
        (32, 1080, 1920, (256, 256), 1),
        (32, 4320, 7680, (96, 96), 0),  # a frame of more than 2^31 values
    ],
)
def test_piece_is_a_part_of_the_video_and_fits_its_buffers(
    frames: int, height: int, width: int, channels: tuple[int, int], groups: int
) -> None:
    assert winograd.groups_at_once(frames, 1, height, width, channels) == groups
    values = winograd.buffer_values(frames, 1, height, width, channels)
    assert values == 7 * groups * height * width * max(channels)
    if groups:
        x = torch.empty((1, channels[0], 4 * groups + 2, height, width), device="meta")
        out = torch.empty((1, channels[1], 4 * groups, height, width), device="meta")
        room = winograd.Buffers(x.bfloat16(), out.shape).parts[0]._base
        assert room is not None
        assert room.numel() == values
        assert room.element_size() == 2


@pytest.mark.slow
def test_kernel_interpreted_equals_torch() -> None:
    pytest.importorskip("triton", reason="this torch comes without Triton; torch then computes")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


def test_kernel_compiles_for_a_gpu_and_moves_eight_values_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    pytest.importorskip("triton", reason="this torch comes without Triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"X": "*bf16", **{f"M{part}": "*fp16" for part in range(6)}, "scale": "fp32"}
    types |= dict.fromkeys(("groups", "frames", "values"), "i32") | dict.fromkeys(("xb", "mb"), "i64")
    aligned = types.keys() - {"scale", "groups", "frames"}
    text = ptx(winograd._split, types, {"BLOCK": winograd._BLOCK}, aligned)
    assert [text.count("ld.global.v4.b32"), text.count("st.global.v4.b32")] == [6, 6]
