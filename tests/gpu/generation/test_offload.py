"""A pipeline whose models the script offloads, shared by two processes: on one GPU, or on two where there are two."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import wanshim
from tests.contract.diffusers import offloading, wan_pipelines
from tests.contract.diffusers.wan_pipelines import generate
from wanshim.core.generation import shared_pipeline
from wanshim.pipelines import PipelineHandle

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]


def shared(pipe: object) -> Any:
    return wanshim.parallelize_pipeline(pipe, ("cuda:0", f"cuda:{torch.cuda.device_count() - 1}"))


def check_frames(way: str, kind: str, share: Callable[[Any], PipelineHandle], request: pytest.FixtureRequest) -> Any:
    """Two calls have the frames of the script alone; the plan."""
    pytest.importorskip("diffusers")
    made = []
    for alone in (True, False):
        torch.manual_seed(0)
        pipe = wan_pipelines.wan22()
        offloading.WAYS[way](pipe)
        if not alone:
            handle = share(pipe)
            request.addfinalizer(handle.remove)
        made.append([generate(pipe, kind, prompts=2), generate(pipe, kind, num_frames=9)])
    assert all(map(torch.equal, *made))
    return handle.plan


@pytest.mark.parametrize("way", offloading.WAYS)
def test_frames_are_those_of_the_script_alone(way: str, request: pytest.FixtureRequest) -> None:
    assert check_frames(way, "wan", shared, request).guidance == 2


@pytest.mark.parametrize("way", [way for way in offloading.WAYS if way != "none"])
def test_one_gpu_streams_in_place_of_the_offload(way: str, request: pytest.FixtureRequest) -> None:
    assert check_frames(way, "wan22", partial(wanshim.parallelize_pipeline, gpus=1), request).replaces_offload


@pytest.mark.parametrize(("way", "stays"), [("model", True), ("block", False)])
def test_forwards_that_wait_for_their_weights_keep_them_as_the_offload_does(
    way: str, stays: bool, request: pytest.FixtureRequest
) -> None:
    """Wide blocks with few tokens take longer to come than to compute."""
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    pipe = wan_pipelines.wan()
    pipe.register_modules(transformer=wan_pipelines._dit(num_layers=6, ffn_dim=2**20))
    offloading.WAYS[way](pipe)
    expected = [generate(pipe, "wan", num_inference_steps=steps) for steps in (2, 40)]
    handle = wanshim.parallelize_pipeline(pipe, gpus=1)
    request.addfinalizer(handle.remove)
    assert torch.equal(generate(pipe, "wan", num_inference_steps=2), expected[0])
    assert torch.equal(generate(pipe, "wan", num_inference_steps=40), expected[1])
    assert handle.plan is not None
    assert handle.plan.keeps_streamed is stays


def test_weights_that_an_offload_keeps_page_locked_are_streamed_from_there(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("diffusers")
    pipe = wan_pipelines.wan()
    pipe.register_modules(transformer=wan_pipelines._dit(num_layers=6, ffn_dim=2**18))
    offloading.WAYS["stream"](pipe)
    expected = generate(pipe, "wan")
    torch.cuda.synchronize()
    places = [p.data_ptr() for p in pipe.transformer.blocks.parameters()]
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    handle = wanshim.parallelize_pipeline(pipe, gpus=1)
    request.addfinalizer(handle.remove)
    assert torch.equal(generate(pipe, "wan"), expected)
    assert handle.plan is not None
    assert handle.plan.replaces_offload
    assert [p.data_ptr() for p in pipe.transformer.blocks.parameters()] == places
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before < 2**20
    handle.remove()
    assert torch.equal(generate(pipe, "wan"), expected)  # by its own offload


def test_a_pipeline_that_has_no_room_as_a_whole_is_streamed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    pipe = wan_pipelines.wan22()
    for name in ("transformer", "transformer_2"):
        pipe.register_modules(**{name: wan_pipelines._dit(num_layers=6, ffn_dim=2**18)})
    num_bytes = sum(p.nbytes for p in pipe.transformer.parameters())
    expected = generate(pipe.to("cuda"), "wan22")
    pipe.to("cpu")
    torch.cuda.empty_cache()
    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    wanshim.activate("none,diffusers.generate")
    request.addfinalizer(wanshim.deactivate)
    whole = torch.cuda.get_device_properties(0).total_memory
    request.addfinalizer(partial(torch.cuda.set_per_process_memory_fraction, 1.0))
    torch.cuda.set_per_process_memory_fraction((1.5 * num_bytes + torch.cuda.memory_reserved()) / whole)
    pipe.to("cuda")
    assert torch.equal(generate(pipe, "wan22"), expected)
    plan, moved = wanshim.report().row("diffusers.generate").notes
    assert "WanPipeline has no room on cuda:0 as a whole" in moved
    assert "cuda:0 streams blocks of its models from host memory" in plan


@pytest.mark.parametrize("way", ["block", "stream"])
def test_worker_without_room_streams_from_call_to_call(
    way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    pipe = wan_pipelines.wan()
    pipe.register_modules(transformer=wan_pipelines._dit(num_layers=6, ffn_dim=8192))
    blocks = sum(p.nbytes for p in pipe.transformer.blocks.parameters())
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    offloading.WAYS[way](pipe)
    expected = [generate(pipe, "wan"), generate(pipe, "wan", num_frames=9), generate(pipe, "wan")]
    monkeypatch.setattr(shared_pipeline.SharedPipeline, "used_by_worker", lambda *_, **__: 0)
    monkeypatch.setattr(shared_pipeline, "available_bytes", lambda device, **_: 8 * 2**20)
    handle = shared(pipe)
    request.addfinalizer(handle.remove)
    found = [generate(pipe, "wan"), generate(pipe, "wan", num_frames=9), generate(pipe, "wan")]
    assert all(map(torch.equal, expected, found))
    assert handle.plan.streamed
    deadline = time.monotonic() + 30  # what the offload kept page-locked is returned behind the copy
    while (kept := torch.cuda.host_memory_stats()["allocated_bytes.current"] - before) > blocks / 2:
        assert time.monotonic() < deadline, kept
        time.sleep(0.1)
