"""Strict beside the framework's own on the user's data: a fault planted in an operator never reaches the user."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.decoding.tiny import LAYOUTS, encode, make_latent, make_vae, make_video
from wanshim.core.decoding import Graph, find_binding, parallelize_decode, parallelize_encode, read_graph
from wanshim.core.decoding.model.framework import Framework
from wanshim.core.decoding.operators.base import StrictOperators
from wanshim.core.decoding.operators.window import Window
from wanshim.core.decoding.plan import VaeJob
from wanshim.core.decoding.proof import CompareState


def spoil(monkeypatch: pytest.MonkeyPatch, applies: Callable[[Window], bool] = lambda window: True) -> None:
    """The last video of a batch loses the last bit of a value in some convolutions."""
    own = StrictOperators.conv

    def conv(self: StrictOperators, window: Window) -> Any:
        out = own(self, window)
        if applies(window) and isinstance(out.main, torch.Tensor):
            out.main[-1, 0, -1, 0, 0] *= 1 + 2**-6
        return out

    monkeypatch.setattr(StrictOperators, "conv", conv)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The frames of each input whose own result a framework was asked for."""
    frames: list[int] = []
    own = Framework.compute

    def compute(self: Framework, given: torch.Tensor) -> torch.Tensor:
        frames.append(given.shape[2])
        return own(self, given)

    monkeypatch.setattr(Framework, "compute", compute)
    return frames


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "output", ["in chunks", *(pytest.param(o, marks=pytest.mark.sweep) for o in ("whole", "uint8"))]
)
def test_fault_in_an_operator_gives_the_user_the_framework_s_frames_and_one_sentence(
    layout: str, output: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vae, latent = make_vae(layout), make_latent(4, batch=2)
    expected = vae.decode(latent).sample
    spoil(monkeypatch)
    taken: list[torch.Tensor] = []
    options: dict[str, Any] = {
        "whole": {},
        "uint8": {"uint8": True},
        "in chunks": {"on_chunk": lambda frames, start: taken.append(frames)},
    }[output]
    handle = parallelize_decode(vae, **options)
    with caplog.at_level(logging.WARNING, "wanshim.decoding"):
        for _ in range(2):
            taken.clear()
            found = vae.decode(latent).sample
            found = torch.cat(taken, 2) if taken else found
            own = expected if output != "uint8" else ((expected.float() + 1) * 127.5).round().to(torch.uint8)
            assert torch.equal(found, own)
    assert [record.message for record in caplog.records if record.name == "wanshim.decoding"] == [
        "parallelize_decode: the decode is left to the framework: strict was not equal for a latent of [2, 4, 4, 5, 7] "
        "in float32: the framework's own"
    ]
    handle.remove()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_in_an_operator_is_seen_in_an_encode(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vae, video = make_vae(layout), make_video(9, 48, 64, batch=2)
    expected = encode(vae, video)
    spoil(monkeypatch, lambda window: window.conv.name == "conv_in")
    handle = parallelize_encode(vae)
    assert torch.equal(encode(vae, video), expected)
    handle.remove()


def test_other_sizes_stay_strict_where_one_was_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = make_vae("2.1")
    spoil(monkeypatch, lambda window: window.data.shape[0] == 2)
    handle = parallelize_decode(vae)
    vae.decode(make_latent(3, batch=2))
    assert handle.plan is not None
    vae.decode(make_latent(3))
    assert handle.plan.claim == "strict, compared"
    handle.remove()


def test_plan_says_what_was_compared_and_never_more(asked: list[int]) -> None:
    vae = make_vae("2.1")
    plans = []
    for options in ({}, {"uint8": True}, {"strict": False}):
        handle = parallelize_decode(vae, **options)  # type: ignore[arg-type]
        vae.decode(make_latent(3))
        plans.append(str(handle.plan))
        handle.remove()
    assert "strict, compared" in plans[0]
    assert "compared the first 2 of 3 latent frames, equal to the framework's own" in plans[0]
    assert "strict, compared" in plans[1]
    assert "within tolerance\n" in plans[2]
    assert not any("bit-identical" in plan for plan in plans)
    assert len(asked) >= 2


@pytest.mark.slow
def test_first_call_of_a_size_is_compared_and_later_ones_are_at_intervals(asked: list[int]) -> None:
    vae = make_vae("2.1")
    handle = parallelize_decode(vae)
    for frames in (5, 5, 3, 5, 3):
        vae.decode(make_latent(frames))
    assert asked[0] == 2
    assert len([frames for frames in asked if frames == 2]) == 2
    (state, _) = handle.parallel._states.values()
    state.calls_left = 0
    asked.clear()
    vae.decode(make_latent(5))
    assert asked[0] == 4
    assert state.calls_left > 100
    handle.remove()


@pytest.mark.slow
def test_fault_that_comes_later_is_seen_at_the_next_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, latent = make_vae("2.1"), make_latent(3)
    expected = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    vae.decode(latent)
    (state,) = handle.parallel._states.values()
    state.calls_left = 0
    spoil(monkeypatch)
    assert torch.equal(vae.decode(latent).sample, expected)
    handle.remove()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), ValueError("what a framework may raise")])
def test_comparison_that_fails_leaves_the_result_and_says_not_compared(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(self: Framework, given: torch.Tensor) -> torch.Tensor:
        raise error

    vae, latent = make_vae("2.1"), make_latent(3)
    expected = vae.decode(latent).sample
    monkeypatch.setattr(Framework, "compute", compute)
    handle = parallelize_decode(vae)
    for _ in range(2):
        assert torch.equal(vae.decode(latent).sample, expected)
        assert handle.plan is not None
        assert handle.plan.claim == "strict, not compared"
    handle.remove()


def test_whole_result_decides_where_the_first_frames_of_the_framework_depend_on_how_many_there_are(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a convolution over all latent frames at once may on a GPU."""
    own = Framework.compute

    def compute(self: Framework, given: torch.Tensor) -> torch.Tensor:
        return own(self, given) * (1 if given.shape[2] == 4 else 1 + 2**-10)

    monkeypatch.setattr(Framework, "compute", compute)
    vae = make_vae("2.1")
    handle = parallelize_decode(vae)
    vae.decode(make_latent(4))
    assert handle.plan is not None
    assert handle.plan.compared == "all 4 latent frames"
    assert asked == [2, 4]
    handle.remove()


def test_values_that_are_no_numbers_are_compared_as_bits_are() -> None:
    vae, latent = make_vae("2.1"), make_latent(3)
    latent[0, 0, 0, 0, 0] = torch.nan
    handle = parallelize_decode(vae)
    vae.decode(latent)
    assert handle.plan is not None
    assert handle.plan.claim == "strict, compared"
    handle.remove()


def test_tiling_that_is_replaced_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    vae, latent = make_vae("2.1"), make_latent(2)
    vae.enable_tiling()
    handle = parallelize_decode(vae)
    with caplog.at_level(logging.WARNING, "wanshim.decoding"):
        for _ in range(2):
            vae.decode(latent)
    (said,) = [record.message for record in caplog.records if record.name == "wanshim.decoding"]
    assert said.startswith("tiling was asked for, and is replaced by:\nsingle on 1 rank")
    assert "not the framework's tiled one" in str(handle.plan)
    assert vae.use_tiling
    handle.remove()


@pytest.mark.parametrize(("latents", "workers"), [(21, 1), (21, 4), (1, 1), (81, 8)])
def test_comparisons_after_the_first_take_less_than_half_a_percent(latents: int, workers: int) -> None:
    job = VaeJob(latent=(1, 16, latents, 8, 8), itemsize=2, ranks=workers, strict=True)
    state = CompareState(dtype=torch.bfloat16)
    for _ in range(6):
        state.passed("a kind", "some", job)
        frames = state.frames_of(job)
        work = (frames - 0.68) * (2 if workers > 1 else 1)  # beside it, over ranks, a short call
        assert work / (state.calls_left * (latents - 0.68) * 0.4 / workers) < 0.005
    assert state.frames_of(job) == latents


def test_graph_of_no_framework_is_not_compared(asked: list[int]) -> None:
    from dataclasses import replace

    vae = make_vae("2.1")
    graph: Graph = replace(read_graph(vae), framework=None)  # type: ignore[type-var]
    handle = parallelize_decode(vae, binding=replace(find_binding(vae), graph=graph))
    vae.decode(make_latent(2))
    assert asked == []
    assert handle.plan is not None
    assert handle.plan.claim == "strict, not compared"
    handle.remove()


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "fast"])
def test_decode_and_encode_work_under_torchs_present_switch_of_precision(strict: bool) -> None:
    """Once it was used, the getters of the older one raise."""
    vae = make_vae("2.1")
    handles = [parallelize_decode(vae, strict=strict), parallelize_encode(vae, strict=strict)]
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        with pytest.raises(RuntimeError, match="legacy and new"):
            torch.get_float32_matmul_precision()
        with torch.no_grad():
            vae.decode(make_latent(2))
            encode(vae, make_video(5, 32, 32))
    finally:
        matmul.fp32_precision = before
    assert {handle.plan.claim for handle in handles} == {"strict, compared" if strict else "within tolerance"}
    for handle in handles:
        handle.remove()
