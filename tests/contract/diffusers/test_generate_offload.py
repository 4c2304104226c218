"""A script that offloads its models generates over GPUs as it does alone: it is started as a user starts it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

import wanshim
from tests.contract import scripts
from tests.contract.diffusers import offloading, wan_pipelines
from wanshim.adapters.diffusers.generate import bind
from wanshim.core.generation import Request, SharedPipeline, host_streams, shared_pipeline
from wanshim.core.generation.host_streams import host_copy
from wanshim.core.streaming import page_locked
from wanshim.core.workers import Workers
from wanshim.errors import ModelInvalid
from wanshim.pipelines import PipelineHandle

CPU = torch.device("cpu")
SCRIPT = "tests.contract.diffusers.offloading"
# What offloads layer by layer through accelerate computes on a GPU alone: tests/gpu/generation has it.
WAYS = [
    ("model", "wan22"),
    ("leaf", "wan"),
    pytest.param("model", "wan", marks=pytest.mark.sweep),
    pytest.param("block", "wan22", marks=pytest.mark.sweep),
    pytest.param("none", "wan", marks=pytest.mark.sweep),
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), WAYS)
def test_script_that_offloads_has_its_frames_over_gpus(way: str, kind: str, tmp_path: Path) -> None:
    said = scripts.check_shared(tmp_path, SCRIPT, way, kind)
    assert "diffusers.generate: left to the framework" not in said, said


@pytest.mark.slow
def test_script_that_offloads_streams_on_one_gpu(tmp_path: Path) -> None:
    expected, _ = scripts.run(tmp_path / "alone", SCRIPT, "model", "wan22")
    found, said = scripts.run(tmp_path / "streamed", SCRIPT, "model", "wan22", behind=scripts.generate(1))
    assert all(map(torch.equal, expected, found))
    assert "WanPipeline on cpu: one GPU, bit for bit the frames of the script alone" in said, said
    assert "cpu streams blocks of its models from host memory, where the script offloads them" in said
    assert "diffusers.generate exercised, 4 calls of WanPipeline.__call__" in said


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Callable[[Any], PipelineHandle]:
    """Makes a pipeline stream its offloaded models on one GPU."""

    def stream(pipe: Any) -> PipelineHandle:
        handle = wanshim.parallelize_pipeline(pipe, gpus=1)
        request.addfinalizer(handle.remove)
        return handle

    return stream


@pytest.fixture(params=["model", "block", "locked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Group offload with a stream keeps its weights page-locked, which takes a GPU: of "locked" they are said to be."""
    if request.param != "locked":
        return str(request.param)
    monkeypatch.setattr(page_locked, "is_page_locked", lambda tensor: tensor.device.type == "cpu")
    return "block"


class Waiting:
    """In place of the events of CUDA, which the CPU has not: each forward waited for its weights."""

    def __init__(self, device: torch.device, may_keep: Callable[..., int], on_kept: Callable[[], None]) -> None:
        self.may_keep, self.on_kept = may_keep, on_kept

    def begin_forward(self) -> float:
        return 1.0

    def begin_anew(self) -> None:
        pass


@pytest.mark.parametrize("way", ["model", "block"])
def test_short_forwards_keep_what_the_offload_itself_would_keep(
    way: str, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`enable_model_cpu_offload` has a whole model on the GPU while it computes, group offload never. The CPU stands in
    for a GPU that waits for weights."""
    pipe = wan_pipelines.wan22()
    for name in ("transformer", "transformer_2"):
        pipe.register_modules(**{name: wan_pipelines._dit(num_layers=5)})
    expected = wan_pipelines.generate(pipe, "wan22")
    offloading.WAYS[way](pipe)
    handle = alone(pipe)
    monkeypatch.setattr(host_streams, "waits_on", Waiting)
    found: list[tuple[int, int, int]] = []
    may_keep = shared_pipeline._Call._may_keep

    def noted(call: Any, module: Any, size: int, most: int) -> int:
        needed = call._working * 9 // 8 + 2**29
        for blocks in (0.99, 1.5, 9):  # that have room beside a forward
            monkeypatch.setattr(
                shared_pipeline, "free_bytes", lambda device, blocks=blocks: needed + int(blocks * size)
            )
            found.append((most, blocks, may_keep(call, module, size, most)))
        return found[-1][-1]

    monkeypatch.setattr(shared_pipeline._Call, "_may_keep", noted)
    assert torch.equal(wan_pipelines.generate(pipe, "wan22"), expected)
    is_whole = way == "model"
    assert found == [(3, 0.99, 0), (3, 1.5, is_whole), (3, 9, 3 * is_whole)] * 2  # of both experts
    assert handle.plan.keeps_streamed is is_whole
    assert ("as many as have room stay, since forwards waited for them" in str(handle.plan)) is is_whole
    assert ("cpu" in handle.plan.peaks) is not is_whole  # what stays depends on what is free


def test_models_are_the_script_s_between_calls(way: str, alone: Any, tmp_path: Path) -> None:
    """With its hooks, and whole where it saves them."""
    pipe = wan_pipelines.wan22()
    expected = wan_pipelines.generate(pipe, "wan22")
    weights = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    offloading.WAYS[way](pipe)
    handle = alone(pipe)
    with torch.inference_mode():
        assert torch.equal(wan_pipelines.generate(pipe, "wan22"), expected)
    assert torch.equal(wan_pipelines.generate(pipe, "wan22"), expected)
    assert handle.plan.replaces_offload
    module = pipe.transformer if way == "model" else pipe.transformer.blocks[0]
    assert hasattr(module, "_hf_hook" if way == "model" else "_diffusers_hook")
    assert not any(block._forward_pre_hooks for block in pipe.transformer.blocks)
    assert "_apply" not in vars(pipe.transformer)
    pipe.transformer.save_pretrained(tmp_path)
    saved = type(pipe.transformer).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())
    bytes_saved = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert bytes_saved < 1.2 * sum(weight.nbytes for weight in weights.values()) + 2**15
    handle.remove()
    assert torch.equal(wan_pipelines.generate(pipe, "wan22"), expected)


def test_callback_between_steps_sees_the_script_s_model_and_changes_it(way: str, alone: Any) -> None:
    seen = []

    def callback(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        weight = pipe.transformer.blocks[0].attn1.to_q.weight
        seen.append(weight.sum().item())
        weight.data.mul_(1.25)
        return {}

    made = []
    for streams in (False, True):
        pipe = wan_pipelines.wan()
        offloading.WAYS[way](pipe)
        if streams:
            alone(pipe)
        made.append(wan_pipelines.generate(pipe, "wan", callback_on_step_end=callback))
        made.append(wan_pipelines.generate(pipe, "wan"))
        made.append(torch.get_rng_state())  # of the generator that the script left to itself
    assert all(map(torch.equal, made[:3], made[3:]))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_streams_end_before_the_decode(way: str, alone: Any) -> None:
    """Its memory is then the decode's."""
    pipe = wan_pipelines.wan()
    offloading.WAYS[way](pipe)
    streaming = []
    handle = alone(pipe)
    blocks = pipe.transformer.blocks
    inner = pipe.vae.decoder.forward

    def decoder(*args: Any, **kwargs: Any) -> Any:
        streaming.append(any(block._forward_pre_hooks for block in blocks))
        return inner(*args, **kwargs)

    pipe.vae.decoder.forward = decoder
    wan_pipelines.generate(pipe, "wan")
    assert handle.plan.replaces_offload
    assert streaming
    assert not any(streaming)


@pytest.fixture
def without_room_for_all(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No GPU is here to fill: the first move of a transformer is said to have no room."""
    moved: list[str] = []
    move = WanTransformer3DModel.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved.append(type(self).__name__)
        if len(moved) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return move(self, *args, **kwargs)

    monkeypatch.setattr(WanTransformer3DModel, "to", to)
    return moved


@pytest.mark.parametrize("how", [(CPU,), ("cpu", torch.float32), {"device": "cpu"}], ids=["device", "both", "named"])
def test_a_pipeline_that_has_no_room_as_a_whole_is_offloaded_and_streamed(
    how: Any, without_room_for_all: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = wan_pipelines.wan22()
    expected = wan_pipelines.generate(pipe, "wan22")
    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    wanshim.activate("none,diffusers.generate")
    assert (pipe.to(**how) if isinstance(how, dict) else pipe.to(*how)) is pipe
    assert all(hasattr(each, "_hf_hook") for each in (pipe.transformer, pipe.transformer_2, pipe.vae))
    assert torch.equal(wan_pipelines.generate(pipe, "wan22"), expected)
    row = wanshim.report().row("diffusers.generate")
    plan, moved = row.notes
    assert moved == (
        "WanPipeline has no room on cpu as a whole: each of its models comes there while it computes, as by "
        "enable_model_cpu_offload()"
    )
    assert "cpu streams blocks of its models from host memory, where the script offloads them" in plan
    assert row.calls == 1


@pytest.mark.parametrize("generators", ["one", "several", "none"])
def test_a_call_that_has_no_room_for_its_first_step_begins_again_offloaded(
    generators: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is here to fill: the first forward is said to have no room."""
    made, steps = [], list[int]()

    def callback(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return {}

    def draws() -> Any:
        torch.manual_seed(3)
        some = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        return {"one": some[0], "several": some, "none": None}[generators]

    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    for without_room in (False, True):
        pipe = wan_pipelines.wan()
        if without_room:
            wanshim.activate("none,diffusers.generate")
            conv, failed = pipe.transformer.patch_embedding, list[int]()

            def fails(module: Any, given: Any, failed: list[int] = failed) -> None:
                if not failed:
                    failed.append(1)
                    raise torch.OutOfMemoryError("CUDA out of memory")

            conv.register_forward_pre_hook(fails)
        made.append(wan_pipelines.generate(pipe, "wan", prompts=2, generator=draws(), callback_on_step_end=callback))
        made.append(torch.rand(3))
    assert torch.equal(made[0], made[2])
    assert torch.equal(made[1], made[3])
    assert steps == [*range(len(steps) // 2)] * 2
    row = wanshim.report().row("diffusers.generate")
    assert any(
        note == "WanPipeline has no room on cpu for a step, and begins again: each of its models comes there while it "
        "computes, as by enable_model_cpu_offload()"
        for note in row.notes
    ), row.notes


def test_a_call_that_has_no_room_behind_its_first_step_is_the_script_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callback has seen a step."""
    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    wanshim.activate("none,diffusers.generate")
    pipe = wan_pipelines.wan()

    def callback(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        wan_pipelines.generate(pipe, "wan", callback_on_step_end=callback)
    assert not hasattr(pipe.transformer, "_hf_hook")


def test_a_pipeline_without_room_is_the_script_s_error_where_it_cannot_be_offloaded(
    without_room_for_all: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    wanshim.activate("none,diffusers.generate")
    pipe = wan_pipelines.wan()
    monkeypatch.setattr(type(pipe), "model_cpu_offload_seq", None)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        pipe.to(CPU)
    assert "model_cpu_offload_seq" in str(caught.value.__cause__)
    wanshim.deactivate()
    without_room_for_all.clear()
    with pytest.raises(torch.OutOfMemoryError):
        pipe.to(CPU)


def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanshim.core.shared.host_memory.available_bytes", lambda: 1)


def without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(num_bytes: int) -> torch.Tensor:
        raise OSError("no pages")

    monkeypatch.setattr("wanshim.core.streaming.host_copy.of_this_process", none)


def without_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def ring(*_: object) -> None:
        raise torch.OutOfMemoryError("no GiB of host memory left, in a manner")

    monkeypatch.setattr("wanshim.core.streaming.host_copy.Ring", ring)


@pytest.mark.parametrize("fails", [without_room, without_pages, without_memory_of_the_device])
@pytest.mark.parametrize("way", ["model", "block"])
def test_host_without_room_leaves_the_script_its_offload(
    way: str, fails: Callable[[pytest.MonkeyPatch], None], alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = wan_pipelines.wan()
    expected = wan_pipelines.generate(pipe, "wan")
    offloading.WAYS[way](pipe)
    handle = alone(pipe)
    fails(monkeypatch)
    for _ in range(2):
        assert torch.equal(wan_pipelines.generate(pipe, "wan"), expected)
    assert not handle.plan.replaces_offload
    assert "GiB of host memory" in handle.plan.rejected["streaming in place of the script's offload"]
    monkeypatch.undo()
    assert torch.equal(wan_pipelines.generate(pipe, "wan"), expected)
    assert handle.plan.replaces_offload


def test_step_cache_stays_with_the_script_s_offload(alone: Any) -> None:
    """Its hooks are among those of the offload."""
    diffusers = pytest.importorskip("diffusers", minversion="0.36")
    made = []
    for streams in (False, True):
        pipe = wan_pipelines.wan()
        pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=1e6))
        offloading.WAYS["block"](pipe)
        handle = alone(pipe) if streams else None
        made.append([wan_pipelines.generate(pipe, "wan", num_inference_steps=4) for _ in range(2)])
    assert all(map(torch.equal, *made))
    assert handle is not None
    assert not handle.plan.replaces_offload


@pytest.mark.parametrize("way", ["model", "sequential"])
def test_models_whose_offload_the_script_removed_are_shared(way: str, request: pytest.FixtureRequest) -> None:
    """Accelerate leaves each module its own forward as an attribute."""
    pipe = wan_pipelines.wan()
    expected = wan_pipelines.generate(pipe, "wan")
    offloading.WAYS[way](pipe)
    pipe.remove_all_hooks()
    assert "forward" in vars(pipe.transformer)
    shared = SharedPipeline(Request(gpus=2))
    request.addfinalizer(shared.close)
    for _ in range(2):
        made = shared.run(partial(bind, pipe), partial(wan_pipelines.generate, pipe, "wan"))
        assert torch.equal(made, expected)
    assert (shared.shared_forwards, shared.shared_vae_calls) == (6, 2)


def test_offload_layer_by_layer_leaves_a_copy_its_weights() -> None:
    from wanshim.adapters.diffusers import offload

    pipe = wan_pipelines.wan()
    expected = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    offloading.WAYS["sequential"](pipe)
    assert {value.device.type for value in pipe.transformer.parameters()} == {"meta"}
    assert offload.is_offloaded(pipe.transformer)
    assert offload.why_not_carried(pipe.transformer) == ""
    with offload.without_hooks(pipe.transformer):
        found = pipe.transformer.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not offload.is_offloaded(pipe.transformer)
    assert {value.device.type for value in pipe.transformer.parameters()} == {"meta"}
    assert offload.is_offloaded(pipe.transformer)


def test_offload_layer_by_layer_lets_go_of_the_memory_that_its_weights_had() -> None:
    from wanshim.adapters.diffusers import offload

    pipe = wan_pipelines.wan()
    offloading.WAYS["sequential"](pipe)
    kept = [module._hf_hook.weights_map for module in pipe.transformer.blocks[0].attn1.modules() if not_whole(module)]
    moved = offload._before(pipe.transformer)
    with offload.without_hooks(pipe.transformer):
        copy = host_copy(pipe.transformer, shared=False, moved=moved)
        copy.wait()
    assert kept
    assert all(copy.offset(weights["weight"]) is not None for weights in kept)


def not_whole(module: Any) -> bool:
    return getattr(getattr(module, "_hf_hook", None), "weights_map", None) is not None


def test_weights_come_while_the_plan_is_made(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, begun = wan_pipelines.wan(), []
    trace = shared_pipeline.trace_forward

    def traced(*args: Any) -> Any:
        begun.append(pipe.transformer in host_streams._COPIES)
        return trace(*args)

    monkeypatch.setattr(shared_pipeline, "trace_forward", traced)
    expected = wan_pipelines.generate(pipe, "wan")
    offloading.WAYS["model"](pipe)
    handle = alone(pipe)
    assert torch.equal(wan_pipelines.generate(pipe, "wan"), expected)
    assert handle.plan.replaces_offload
    assert begun[0]


def test_weights_are_sent_from_where_they_are_streamed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pipe, places, hold = wan_pipelines.wan(), [], Workers.hold

    def held(workers: Workers, module: Any, **options: Any) -> int:
        if module is pipe.transformer:
            copy = host_streams._COPIES[module]
            places.extend(copy.offset(weight) is not None and copy.has(0) for weight in module.blocks[0].parameters())
        return hold(workers, module, **options)

    expected = wan_pipelines.generate(pipe, "wan")
    offloading.WAYS["model"](pipe)
    monkeypatch.setattr(Workers, "hold", held)
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    assert torch.equal(wan_pipelines.generate(pipe, "wan"), expected)
    assert not handle.plan.streamed
    assert places
    assert all(places)


def cast_layerwise(model: Any) -> None:
    """Weights are stored in eight bits, and each layer's hooks turn them into bf16 and back."""
    model.to(torch.bfloat16)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


def large() -> Any:
    pipe = wan_pipelines.wan()
    pipe.register_modules(transformer=wan_pipelines._dit(num_layers=6, ffn_dim=8192))
    return pipe


def large_offloaded() -> Any:
    pipe = large()
    offloading.WAYS["block"](pipe)
    return pipe


def leave_no_room_for_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each other device holds two of its blocks, and not all."""
    monkeypatch.setattr(shared_pipeline.SharedPipeline, "used_by_worker", lambda *_, **__: 0)
    monkeypatch.setattr(shared_pipeline, "available_bytes", lambda device, **_: 8 * 2**20)


def test_worker_without_room_streams_from_call_to_call(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Also what changes between calls: adapters are added, and all weights are other tensors."""
    pipe = large_offloaded()

    def call(**changed: Any) -> torch.Tensor:
        return wan_pipelines.generate(pipe, "wan", **changed)

    expected = [call(prompts=2), call(num_frames=9)]
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    assert all(map(torch.equal, expected, [call(prompts=2), call(num_frames=9)]))
    assert not handle.plan.streamed
    assert not host_copy(pipe.transformer, shared=False).descriptors  # the worker has its own on its device
    leave_no_room_for_its_copy(monkeypatch)
    assert all(map(torch.equal, expected, [call(prompts=2), call(num_frames=9)]))
    assert handle.plan.streamed
    assert host_copy(pipe.transformer, shared=False).descriptors
    files = [weights_in(pid) for pid in (os.getpid(), *handle._shared.pids)]
    assert len(files) == 2
    assert files[0] & files[1], "both processes map one file"
    assert "the others stream blocks of its models from host memory" in str(handle.plan)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    for parameter in pipe.transformer.parameters():
        parameter.data = parameter.data * 1.01
    found = [call(), call()]
    handle.remove()
    assert all(torch.equal(each, call()) for each in found)


@pytest.mark.parametrize("offloaded", [True, False])
def test_host_without_room_for_files_leaves_the_call_to_one_process(
    offloaded: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Of those that its processes would stream from, as a container's limit has it: pages are fetched as they fill."""
    pipe = large_offloaded() if offloaded else large()
    expected = wan_pipelines.generate(pipe, "wan")
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    leave_no_room_for_its_copy(monkeypatch)
    with monkeypatch.context() as full:

        def fetch(memory: torch.Tensor) -> bool:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr("wanshim.core.streaming.host_copy.populate", fetch)
        assert torch.equal(expected, wan_pipelines.generate(pipe, "wan"))
        assert handle.plan.gpus == 1
        assert "No space left" in str(handle.plan)
        if offloaded:
            assert not host_copy(pipe.transformer, shared=False).descriptors, "it streams from memory of its own"
    assert torch.equal(expected, wan_pipelines.generate(pipe, "wan"))
    assert handle.plan.streamed
    assert handle.plan.gpus == 2


@pytest.mark.parametrize("offloaded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layerwise_casting_is_carried_to_other_gpus(offloaded: bool, request: pytest.FixtureRequest) -> None:
    """With an adapter, whose layers have a hook of their own."""
    pipe = wan_pipelines.wan()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "lora")
    cast_layerwise(pipe.transformer)
    if offloaded:
        offloading.WAYS["block"](pipe)

    def calls() -> list[torch.Tensor]:
        return [wan_pipelines.generate(pipe, "wan", prompts=2), wan_pipelines.generate(pipe, "wan", num_frames=9)]

    expected = calls()
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    assert all(map(torch.equal, expected, calls()))
    assert handle.plan.guidance == 2
    handle.remove()
    alone = wanshim.parallelize_pipeline(pipe, gpus=1)  # its hooks would be off with those of the offload
    request.addfinalizer(alone.remove)
    assert all(map(torch.equal, expected, calls()))
    assert alone.plan is None or not alone.plan.replaces_offload
    assert "_wanshim_hooks" not in vars(pipe.transformer.blocks[0].ffn.net[2])


def weights_in(pid: int) -> set[str]:
    """Files of weights that a process maps, by inode."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "wanshim-weights" in line}


def test_what_is_moved_in_another_way_is_named() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    from wanshim.adapters.diffusers import offload

    model = wan_pipelines.wan().transformer
    add_hook_to_module(model.blocks[1], ModelHook())
    assert offload.why_not_carried(model) == "(blocks.1) is moved by accelerate (ModelHook, as of device_map)"


@pytest.mark.parametrize("first", ["forward", "offload"])
@pytest.mark.parametrize("way", ["model", "block"])
def test_forward_of_the_program_s_own_is_seen_beneath_its_offload(way: str, first: str) -> None:
    pipe = wan_pipelines.wan()
    part = pipe.transformer.blocks[0]
    own = part.forward
    if first == "offload":
        offloading.WAYS[way](pipe)
        own = part.forward
    part.forward = lambda *args, **kwargs: own(*args, **kwargs)
    if first == "forward":
        offloading.WAYS[way](pipe)
    with pytest.raises(ModelInvalid, match=r"\(blocks.0\) has a forward of its own"):
        wanshim.parallelize_pipeline(pipe, gpus=2)


def test_pipeline_without_a_vae_shares_its_forwards(request: pytest.FixtureRequest) -> None:
    pipe = wan_pipelines.wan()
    latents = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    changed = {"latents": latents, "output_type": "latent"}
    pipe.register_modules(vae=None)
    expected = wan_pipelines.generate(pipe, "wan", **changed)
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    assert torch.equal(wan_pipelines.generate(pipe, "wan", **changed), expected)
    assert handle.plan.guidance == 2
