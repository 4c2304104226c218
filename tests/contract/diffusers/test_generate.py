"""`diffusers.generate` and `wanshim.parallelize_pipeline`: frames of two processes are those of one, bit for bit."""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import wanshim
from tests.contract.diffusers import wan_pipelines
from tests.contract.diffusers.wan_pipelines import generate
from tests.contract.scripts import check_shared
from wanshim.adapters.diffusers.generate import bind
from wanshim.core.decoding.ranks.exchange import Comm
from wanshim.core.decoding.run import CallRun
from wanshim.core.generation import Request, SharedPipeline, together
from wanshim.core.workers import Workers
from wanshim.errors import FeatureUnavailable, ModelInvalid, WanshimError, WorkersFailed
from wanshim.patching.pipeline_call import SHARED

pytestmark = pytest.mark.timeout(600)  # a worker imports torch and diffusers


class Both:
    """A pipeline, and the same one over two processes."""

    def __init__(self, kind: str) -> None:
        self.kind, self.pipe = kind, wan_pipelines.MADE[kind]()
        self.handle: Any = None

    def call(self, **changed: Any) -> torch.Tensor:
        return generate(self.pipe, self.kind, **changed)

    def alone(self, **changed: Any) -> torch.Tensor:
        """By the method of the class, which the handle does not change."""
        own = type(self.pipe)
        self.pipe.__class__ = own.__mro__[1]
        try:
            return self.call(**changed)
        finally:
            self.pipe.__class__ = own

    def shared(self, forwards: int | None = None, **changed: Any) -> torch.Tensor:
        if self.handle is None:
            self.handle = wanshim.parallelize_pipeline(self.pipe, gpus=2)
        before = self.handle._shared.shared_forwards
        frames = self.call(**changed)
        assert forwards is None or self.handle._shared.shared_forwards - before == forwards
        return frames


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    made = Both("wan")
    made.shared()
    yield made
    made.handle.remove()


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPipeline]:
    """One worker for pipelines of every class: it holds whatever the last call had."""
    made = SharedPipeline(Request(gpus=2))
    yield made
    made.close()


@pytest.mark.parametrize("kind", wan_pipelines.MADE)
def test_frames_of_two_processes_are_those_of_one(shared: SharedPipeline, kind: str) -> None:
    pipe = wan_pipelines.MADE[kind]()
    expected = generate(pipe, kind)
    before = shared.shared_forwards
    frames = shared.run(partial(bind, pipe), partial(generate, pipe, kind))
    assert torch.equal(expected, frames)
    assert shared.shared_forwards - before == (2 if kind == "v2v" else 3)  # of three steps, at strength 0.8
    assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, kind)))
    assert shared.plan is not None
    assert shared.plan.guidance == 2
    assert torch.equal(expected, generate(pipe, kind))


@pytest.mark.parametrize(("kind", "first", "later"), [("wan", 1, 1), ("i2v", 1, 2)], ids=["wan", "i2v"])
def test_decode_and_encode_go_over_the_processes(shared: SharedPipeline, kind: str, first: int, later: int) -> None:
    """The first call encodes before any forward, and so before there is a plan."""
    pipe = wan_pipelines.MADE[kind]()
    expected, shared.plan = generate(pipe, kind), None
    for calls in (first, later):
        before = shared.shared_vae_calls
        assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, kind)))
        assert shared.shared_vae_calls - before == calls
        assert not {"_decode", "_encode"} & vars(pipe.vae).keys()


def test_a_decode_is_prepared_behind_the_first_forward_and_its_vae_is_sent_once(
    shared: SharedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, found = wan_pipelines.wan(), []
    expected = generate(pipe, "wan")
    fresh = {name: value for name, value in vars(pipe.vae).items() if "conv_idx" not in name}  # as when loaded
    pipe.vae.__dict__ = fresh
    prepare, run = together.prepare, together.run

    def noted(workers: Workers, size: int, vae: Any, **options: Any) -> None:
        prepare(workers, size, vae, **options)
        (parallel,) = together._KNOWN[vae].values()
        found.append(("prepared", shared.shared_forwards - before, parallel._comm._peers is not None))

    def held(workers: Workers, size: int, vae: Any, *args: Any, **options: Any) -> torch.Tensor:
        found.append(workers._running.copies[0]._modules[workers.key(vae)])
        return run(workers, size, vae, *args, **options)

    monkeypatch.setattr(together, "prepare", noted)
    monkeypatch.setattr(together, "run", held)
    for _ in range(2):
        before = shared.shared_forwards
        assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, "wan")))
    assert [found[0], found[2]] == [("prepared", 1, True)] * 2
    assert found[1] is found[3]


def test_models_that_the_program_drops_are_freed(shared: SharedPipeline) -> None:
    """As between the denoising and what comes after it, while the pipeline and its workers live."""
    pipe = wan_pipelines.wan()
    shared.run(partial(bind, pipe), partial(generate, pipe, "wan"))
    left = [weakref.ref(tensor) for model in (pipe.transformer, pipe.vae) for tensor in model.parameters()]
    pipe.transformer = pipe.vae = None
    gc.collect()
    assert not [each for each in left if each() is not None]
    assert shared.pids


def test_tiles_of_diffusers_are_its_own(shared: SharedPipeline) -> None:
    pipe = wan_pipelines.wan()
    pipe.vae.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16)
    expected, before = generate(pipe, "wan"), shared.shared_vae_calls
    assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, "wan")))
    assert shared.shared_vae_calls == before
    assert pipe.vae not in together._KNOWN, "nothing is prepared for a decode that they do not share"


def test_latents_need_no_decode_and_none_is_prepared(shared: SharedPipeline) -> None:
    pipe, latents = wan_pipelines.wan(), partial(generate, output_type="latent")
    expected = latents(pipe, "wan")
    found = shared.run(partial(bind, pipe, output_type="latent"), partial(latents, pipe, "wan"))
    assert torch.equal(expected, found)
    assert pipe.vae not in together._KNOWN


@pytest.mark.slow
def test_processes_that_cannot_connect_ahead_do_it_for_the_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, shared = (
        wan_pipelines.wan(),
        SharedPipeline(Request(gpus=2), prepare=f"{wan_pipelines.__name__}:lose_a_connection"),
    )
    expected = generate(pipe, "wan")
    monkeypatch.setattr(Comm, "connect", Comm.connect)
    wan_pipelines.lose_a_connection()
    assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, "wan")))
    assert (shared.shared_forwards, shared.shared_vae_calls) == (3, 1)
    shared.close()


@pytest.mark.slow
def test_a_worker_that_is_killed_in_a_decode_is_named_and_the_frames_are_not_lost(
    shared: SharedPipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = wan_pipelines.wan()
    for _ in range(3):  # until all connections are open: one that a peer begins and does not complete ends after 30 s
        expected = shared.run(partial(bind, pipe), partial(generate, pipe, "wan"))
    (pid,), execute = shared.pids, CallRun._execute

    def killing(*args: Any) -> Any:
        os.kill(pid, 9)
        return execute(*args)

    with monkeypatch.context() as patch:
        patch.setattr(CallRun, "_execute", killing)
        assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, "wan")))
    assert re.search(f"the decode is left to this process: .*process {pid}.* was ended by SIGKILL", caplog.text)
    before = shared.shared_vae_calls
    assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, "wan")))
    assert shared.shared_vae_calls == before + 1


@pytest.mark.parametrize(
    "changed",
    [
        {"prompts": 2},
        {"num_videos_per_prompt": 2},
        {"height": 48, "width": 64, "num_frames": 9},
        {"num_inference_steps": 1},
        {"attention_kwargs": {"scale": 1.0}},
    ],
    ids=lambda changed: ", ".join(f"{key} {value}" for key, value in changed.items()),
)
def test_any_batch_and_size_has_the_same_frames(both: Both, changed: dict[str, Any]) -> None:
    steps = changed.get("num_inference_steps", 3)
    assert torch.equal(both.alone(**changed), both.shared(forwards=steps, **changed))


@pytest.mark.parametrize(
    "name", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "FlowMatchHeunDiscreteScheduler"]
)
def test_any_scheduler_has_the_same_frames(both: Both, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    options = {} if "Flow" in name else {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    monkeypatch.setattr(both.pipe, "scheduler", getattr(diffusers, name)(**options))
    forwards = 5 if "Heun" in name else 3
    assert torch.equal(both.alone(), both.shared(forwards=forwards))


def test_inference_mode_has_the_same_frames(both: Both) -> None:
    with torch.inference_mode():
        assert torch.equal(both.alone(), both.shared(forwards=3))


def test_callback_that_changes_latents_has_the_same_frames(both: Both) -> None:
    def callback(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {"latents": given["latents"] * (1 + step)}

    assert torch.equal(
        both.alone(callback_on_step_end=callback), both.shared(forwards=3, callback_on_step_end=callback)
    )


def test_callback_that_switches_guidance_off_has_the_same_frames(both: Both) -> None:
    def callback(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = 0.0
        return {}

    assert torch.equal(
        both.alone(callback_on_step_end=callback), both.shared(forwards=1, callback_on_step_end=callback)
    )


def test_callback_that_changes_weights_reaches_the_copy(both: Both) -> None:
    weight = both.pipe.transformer.proj_out.weight

    def callback(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        weight.data *= 1.25
        return {}

    before = weight.detach().clone()
    alone = both.alone(callback_on_step_end=callback)
    weight.data = before.clone()
    shared = both.shared(forwards=3, callback_on_step_end=callback)
    weight.data = before
    assert torch.equal(alone, shared)


def test_interrupt_ends_the_loop_and_the_next_call_is_whole(both: Both) -> None:
    def callback(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = True
        return {}

    assert torch.equal(
        both.alone(callback_on_step_end=callback), both.shared(forwards=1, callback_on_step_end=callback)
    )
    assert torch.equal(both.alone(), both.shared(forwards=3))


def test_without_guidance_there_is_no_pair_and_the_plan_says_so(both: Both) -> None:
    alone, shared = both.alone(guidance_scale=1.0), both.shared(forwards=3, guidance_scale=1.0)
    assert (alone - shared).abs().max() <= 1e-5
    assert "tokens over 2, the frames of one GPU up to rounding" in str(both.handle.plan)
    assert "switches guidance off" in str(both.handle.plan)
    both.shared(forwards=3)
    assert both.handle.plan.guidance == 2


def test_lora_loaded_scaled_swapped_fused_and_removed_between_calls(both: Both) -> None:
    from peft import LoraConfig

    model = both.pipe.transformer

    def add(name: str) -> None:
        torch.manual_seed(len(name))
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), name)

    steps: list[tuple[str, Callable[[], object]]] = [
        ("loaded", lambda: add("one")),
        ("scaled", lambda: model.set_adapters(["one"], [0.5])),
        ("another", lambda: add("second")),
        ("swapped", lambda: model.set_adapters(["second"], [1.0])),
        ("both", lambda: model.set_adapters(["one", "second"], [0.3, 0.7])),
        ("fused", lambda: model.fuse_lora()),
        ("unfused", lambda: model.unfuse_lora()),
        ("removed", lambda: model.delete_adapters(["one", "second"])),
    ]
    seen = [both.alone()]
    for name, step in steps:
        step()
        alone = both.alone()
        assert torch.equal(alone, both.shared(forwards=3)), name
        seen.append(alone)
    assert not torch.equal(seen[1], seen[2]), "the steps change something"


def test_lora_by_the_pipelines_own_methods_reaches_the_copy(shared: SharedPipeline) -> None:
    pipe = wan_pipelines.wan()
    width = pipe.transformer.blocks[0].attn1.to_q.weight.size(0)
    seeded = torch.Generator().manual_seed(3)

    def load(name: str) -> None:
        weights = {"A": torch.randn(2, width, generator=seeded), "B": torch.randn(width, 2, generator=seeded)}
        named = {f"transformer.blocks.0.attn1.to_q.lora_{part}.weight": each for part, each in weights.items()}
        pipe.load_lora_weights(named, adapter_name=name)

    steps: list[Callable[[], object]] = [
        lambda: load("one"),
        lambda: (load("two"), pipe.set_adapters(["two"])),
        lambda: pipe.set_adapters(["one", "two"], [0.3, 0.7]),
        lambda: pipe.fuse_lora(lora_scale=0.5),
        lambda: pipe.unfuse_lora(),
        lambda: pipe.unload_lora_weights(),
    ]
    seen = [generate(pipe, "wan")]
    for number, step in enumerate(steps):
        step()
        seen.append(generate(pipe, "wan"))
        before = shared.shared_forwards
        assert torch.equal(seen[-1], shared.run(partial(bind, pipe), partial(generate, pipe, "wan"))), number
        assert shared.shared_forwards - before == 3
    assert not any(torch.equal(first, second) for first, second in pairwise(seen))


def test_lora_that_was_off_for_one_call_has_its_scale_again(both: Both) -> None:
    """A forward with scale 0 leaves 1 in the model that computes it, the copy too; then the program sets 0.5 again."""
    from peft import LoraConfig

    model = both.pipe.transformer
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), "one")
    model.set_adapters(["one"], [0.5])
    expected = both.shared(forwards=3)
    both.shared(forwards=3, attention_kwargs={"scale": 0.0})
    model.set_adapters(["one"], [0.5])
    found = both.shared(forwards=3)
    alone = both.alone()
    model.delete_adapters(["one"])
    assert torch.equal(alone, expected)
    assert torch.equal(alone, found)


def test_experts_that_the_program_swaps_and_changes_are_computed_as_they_are_now(shared: SharedPipeline) -> None:
    pipe = wan_pipelines.wan22()
    if not hasattr(pipe, "transformer_2"):
        pytest.skip("pipelines of this release have one transformer")
    first = shared.run(partial(bind, pipe), partial(generate, pipe, "wan22"))
    pipe.register_modules(transformer=pipe.transformer_2, transformer_2=pipe.transformer)
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(1.5)
    expected, before = generate(pipe, "wan22"), shared.shared_forwards
    assert not torch.equal(expected, first)
    assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, "wan22")))
    assert shared.shared_forwards - before == 3


@pytest.mark.parametrize(
    "name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_weights_that_torchao_quantized_are_copied_as_they_are(shared: SharedPipeline, name: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    pipe = wan_pipelines.wan()
    plain = generate(pipe, "wan")
    torchao.quantize_(pipe.transformer, getattr(torchao, name)())
    expected, before = generate(pipe, "wan"), shared.shared_forwards
    assert not torch.equal(plain, expected)
    assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, "wan")))
    assert shared.shared_forwards - before == 3
    assert shared._workers is not None
    assert shared._workers.hold(pipe.transformer) == 0


def test_two_pipelines_share_the_workers_and_take_turns(both: Both) -> None:
    other = Both("i2v")
    expected, of_other, found = both.alone(), other.call(), dict[str, torch.Tensor]()
    other.shared(forwards=3)
    assert both.handle._shared.pids == other.handle._shared.pids
    threads = [
        threading.Thread(target=lambda each=each: found.update({each.kind: each.call()})) for each in (both, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(expected, found["wan"])
    assert torch.equal(of_other, found["i2v"])
    workers = both.handle._shared._workers
    assert workers.holds(0, [both.pipe.transformer, other.pipe.transformer])
    other.handle.remove()
    assert workers.pids, "another pipeline uses them"
    assert workers.holds(0, [both.pipe.transformer])
    assert not workers.holds(0, [other.pipe.transformer])
    assert torch.equal(expected, both.shared(forwards=3))


def test_a_size_that_the_model_refuses_is_its_own_error_and_leaves_the_workers(both: Both) -> None:
    refused = {"height": 32 * 17}  # more positions than its rotary embedding has
    with pytest.raises(RuntimeError) as expected:
        both.alone(**refused)
    pids = both.handle._shared.pids
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"):
        both.shared(**refused)
    assert both.handle._shared.pids == pids
    assert torch.equal(both.alone(), both.shared(forwards=3))


def test_a_copy_that_computes_other_values_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own table decides, as a registry of kernels would: here it has another activation in it."""
    pipe, shared = (
        wan_pipelines.wan(),
        SharedPipeline(Request(gpus=2), prepare=f"{wan_pipelines.__name__}:compute_otherwise"),
    )
    expected = generate(pipe, "wan")
    for _ in range(2):
        assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, "wan")))
        assert shared.plan is not None
        assert shared.plan.gpus == 1
        assert "a worker computes other values" in shared.plan.rejected["guidance over 2"]
    assert shared.shared_forwards == 0
    shared.close()


def test_error_of_the_callback_leaves_the_workers_and_the_next_call_is_whole(both: Both) -> None:
    def callback(*_: Any) -> dict[str, Any]:
        raise KeyError("of the user")

    pids = both.handle._shared.pids
    with pytest.raises(KeyError, match="of the user"):
        both.shared(callback_on_step_end=callback)
    assert both.handle._shared.pids == pids
    assert torch.equal(both.alone(), both.shared(forwards=3))


def test_error_between_the_two_forwards_starts_new_workers(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = both.pipe.transformer, []
    original = type(model).cache_context

    def cache_context(self: Any, name: str, **rest: Any) -> Any:
        calls.append(name)
        if name == "uncond":
            raise KeyboardInterrupt
        return original(self, name, **rest)

    pids = both.handle._shared.pids
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "cache_context", cache_context)
        with pytest.raises(KeyboardInterrupt):
            both.shared()
    assert calls == ["cond", "uncond"]
    assert "forward" not in vars(model)
    assert both.handle._shared.pids == ()
    assert torch.equal(both.alone(), both.shared(forwards=3))
    assert both.handle._shared.pids != pids


def test_a_killed_worker_ends_the_call_by_name_and_the_next_is_whole(both: Both) -> None:
    (pid,) = both.handle._shared.pids

    def callback(*_: Any) -> dict[str, Any]:
        os.kill(pid, 9)
        return {}

    with pytest.raises(WorkersFailed, match=f"process {pid}.* was ended by SIGKILL"):
        both.shared(callback_on_step_end=callback)
    assert torch.equal(both.alone(), both.shared(forwards=3))


def test_calls_of_two_threads_take_turns(both: Both) -> None:
    expected, frames = both.alone(), []
    threads = [threading.Thread(target=lambda: frames.append(both.call())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(frames) == 2
    assert all(torch.equal(expected, each) for each in frames)


def test_forwards_have_their_signature_within_a_call(shared: SharedPipeline) -> None:
    """Blocks of diffusers' modular pipelines choose arguments by it, and the report finds no method hidden."""
    seen = []

    def callback(pipe: Any, *_: Any) -> dict[str, Any]:
        seen.append(set(inspect.signature(pipe.transformer.forward).parameters))
        return {}

    pipe = wan_pipelines.wan()
    own = set(inspect.signature(pipe.transformer.forward).parameters)
    call = partial(generate, pipe, "wan", callback_on_step_end=callback)
    shared.run(partial(bind, pipe, callback_on_step_end=callback), call)
    assert seen
    assert all(names == own for names in seen)


def test_another_loop_than_is_known_gives_no_frames(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that calls the model again with other latents would read a result that is not there yet."""
    binding_of = both.pipe.transformer

    def loop(pipe: Any, copies: bool) -> None:
        x = torch.randn(1, 16, 2, 4, 4)
        given = {"timestep": torch.ones(1), "encoder_hidden_states": torch.randn(1, 8, 16), "return_dict": False}
        with torch.no_grad():
            binding_of(hidden_states=x, **given)
            if copies:
                binding_of(hidden_states=x + 1, **given)

    both.pipe._guidance_scale = 5.0
    shared = SharedPipeline(Request(gpus=2))
    with pytest.raises(WanshimError, match="with other inputs between the two forwards"):
        shared.run(lambda: bind(both.pipe), lambda: loop(both.pipe, True))
    with pytest.raises(WanshimError, match="ended between the two forwards"):
        shared.run(lambda: bind(both.pipe), lambda: loop(both.pipe, False))
    assert shared.pids == ()


def hooked(pipe: Any) -> None:
    pipe.transformer.blocks[0].register_forward_hook(lambda *_: None)


def offloaded(pipe: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(pipe.transformer, ModelHook())


def cached(pipe: Any) -> None:
    from diffusers import PyramidAttentionBroadcastConfig

    ranges = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (100, 800)}
    config = PyramidAttentionBroadcastConfig(**ranges, current_timestep_callback=lambda: pipe.current_timestep)
    pipe.transformer.enable_cache(config)


def dropping(pipe: Any) -> None:
    from peft import LoraConfig

    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], lora_dropout=0.5))


class Quantized(torch.Tensor):
    """A tensor of a class of its own, as libraries that quantize make them."""


def quantized(pipe: Any) -> None:
    weight = pipe.transformer.proj_out.weight
    pipe.transformer.proj_out.weight = torch.nn.Parameter(weight.detach().as_subclass(Quantized), False)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "device_map": (lambda pipe: setattr(pipe, "hf_device_map", {"transformer": 0}), "placed by device_map"),
    "cpu offload": (offloaded, "moved by accelerate"),
    "cache": (cached, "has hooks of diffusers: .*pyramid"),
    "dropout": (dropping, r"\(blocks\.0\.attn1\.to_q\.lora_dropout\.default\) drops at random"),
    "hook": (hooked, r"\(blocks.0\) has forward hooks"),
    "forward": (
        lambda pipe: setattr(pipe.transformer, "forward", partial(pipe.transformer.forward)),
        "forward of its own",
    ),
    "weights": (lambda pipe: quantized(pipe), "Quantized is no class of an installed package"),
    "class": (lambda pipe: setattr(pipe, "transformer", torch.nn.Linear(2, 2)), "is not a class of diffusers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    change, text = REFUSED[name]
    pipe = wan_pipelines.wan()
    change(pipe)
    with pytest.raises(ModelInvalid, match=f"WanPipeline cannot use several GPUs: .*{text}"):
        wanshim.parallelize_pipeline(pipe, gpus=2)


CALLED = [name for name in REFUSED if name != "class"]  # with which no pipeline can be called


@pytest.mark.parametrize("name", CALLED)
def test_what_is_not_served_runs_on_one_gpu_and_the_report_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, text = REFUSED[name]
    pipe = wan_pipelines.wan()
    change(pipe)
    expected = generate(pipe, "wan")
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    assert torch.equal(expected, generate(pipe, "wan"))
    (row,) = [row for row in wanshim.report().rows if row.feature == "diffusers.generate"]
    assert any(re.search(f"WanPipeline on one GPU: .*{text}", note) for note in row.notes), row.notes


@pytest.mark.parametrize("name", CALLED)
def test_under_strict_it_stops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, text = REFUSED[name]
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.activate()
    pipe = wan_pipelines.wan()
    change(pipe)
    with pytest.raises(FeatureUnavailable, match=f"WanPipeline would run on one GPU: .*{text}"):
        generate(pipe, "wan")


@pytest.mark.parametrize("by", ["variable", "handle"])
def test_arguments_that_the_pipeline_does_not_take_are_its_own_error(
    by: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pipe = wan_pipelines.wan()
    with pytest.raises(TypeError) as expected:
        generate(pipe, "wan", unknown=1)
    assert "WanPipeline.__call__" in str(expected.value)
    if by == "variable":
        monkeypatch.setenv("WANSHIM_GENERATE", "2")
        wanshim.activate(strict=True)
    else:
        request.addfinalizer(wanshim.parallelize_pipeline(pipe, gpus=2).remove)
    with pytest.raises(TypeError, match=f"^{re.escape(str(expected.value))}$"):
        generate(pipe, "wan", unknown=1)
    assert wanshim.report().row("diffusers.generate").calls == 0


def test_handle_refuses_a_call_that_a_wrapper_takes_and_the_pipeline_does_not(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pipe = wan_pipelines.wan()
    own = type(pipe).__call__

    @wraps(own)
    def call(self: Any, *args: Any, more: Any = None, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(pipe), "__call__", call)
    request.addfinalizer(wanshim.parallelize_pipeline(pipe, gpus=2).remove)
    with pytest.raises(ModelInvalid, match="a wrapper around its __call__ takes other arguments"):
        generate(pipe, "wan", more=1)


def test_several_processes_of_one_program_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.activate()
    monkeypatch.setenv("WORLD_SIZE", "2")  # as in a process that was forked since
    with pytest.raises(FeatureUnavailable, match="several processes run this program; start it once"):
        generate(wan_pipelines.wan(), "wan")


def test_a_pipeline_is_parallelized_once_and_restored() -> None:
    pipe = wan_pipelines.wan()
    own = type(pipe)
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    assert type(pipe).__name__ == "WanPipeline"
    assert isinstance(pipe, own)
    with pytest.raises(ModelInvalid, match="uses several GPUs already"):
        wanshim.parallelize_pipeline(pipe, gpus=2)
    handle.remove()
    handle.remove()
    assert type(pipe) is own
    wanshim.parallelize_pipeline(pipe, gpus=2).remove()


def test_another_pipeline_is_refused_by_name() -> None:
    with pytest.raises(ModelInvalid, match="no adapter serves pipelines of torch"):
        wanshim.parallelize_pipeline(torch.nn.Linear(2, 2))


SCRIPT = """
    import sys, torch
    from tests.contract.diffusers import wan_pipelines

    print("the program runs")
    torch.set_num_threads(1)
    pipe = wan_pipelines.wan()
    torch.save(wan_pipelines.generate(pipe, "wan"), sys.argv[1])
"""


@pytest.mark.slow
def test_an_unmodified_script_has_the_same_frames_by_one_command(tmp_path: Path) -> None:
    """No `__main__` guard, and helpers beside the script."""
    script = tmp_path / "generate.py"
    script.write_text(textwrap.dedent(SCRIPT))
    commands = {
        "alone": [sys.executable, str(script), str(tmp_path / "alone")],
        "shared": [
            *(sys.executable, "-m", "wanshim", "generate", "--gpus", "2", "--", str(script)),
            str(tmp_path / "shared"),
        ],
    }
    machine = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = {
        name: subprocess.run(command, env=machine, capture_output=True, text=True, check=False)
        for name, command in commands.items()
    }
    assert {name: each.returncode for name, each in done.items()} == {"alone": 0, "shared": 0}, done["shared"].stderr
    assert done["shared"].stdout == done["alone"].stdout == "the program runs\n"
    assert "diffusers.generate: WanPipeline on cpu, cpu: guidance over 2" in done["shared"].stderr
    frames = [torch.load(tmp_path / name, weights_only=True) for name in commands]
    assert torch.equal(*frames)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["here", "spawn"])
def test_service_has_its_frames_and_the_report_is_true(way: str, tmp_path: Path) -> None:
    if not hasattr(wan_pipelines.wan(), "enable_lora_hotswap"):
        pytest.skip("pipelines of this release have no enable_lora_hotswap")
    said = check_shared(tmp_path, "tests.contract.diffusers.service", *([way] * (way == "spawn")))
    assert "diffusers.generate: left to the framework" not in said, said
    assert "had no effect" not in said, said


AHEAD = """
    import json, subprocess, sys

    LOOK = "import diffusers; from wanshim.core.workers import AHEAD; print(AHEAD._workers)"
    child = subprocess.Popen([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, text=True)

    import diffusers
    from wanshim.core.workers import AHEAD

    found = {"waiting": [worker.process.pid for worker in AHEAD._workers]}
    found["pipelines"] = [name for name in sys.modules if name.startswith("diffusers.pipelines.")]
    from diffusers import WanImageToVideoPipeline, WanPipeline

    found["of two pipelines"] = len(AHEAD._workers)
    if sys.argv[1] == "generates":
        from tests.contract.diffusers import wan_pipelines
        from wanshim.patching.pipeline_call import SHARED

        pipes = [wan_pipelines.wan(), wan_pipelines.wan()]
        frames = [wan_pipelines.generate(pipe, "wan") for pipe in pipes]
        found["taken"] = [list(SHARED[pipe].pids) for pipe in pipes]
        found["equal"] = frames[0].equal(frames[1])
    print(json.dumps({**found, "of the child": child.communicate()[0].strip()}))
"""


@pytest.mark.parametrize("what", ["generates", pytest.param("never", marks=pytest.mark.slow)])
def test_the_command_starts_workers_when_the_script_imports_its_framework(what: str, tmp_path: Path) -> None:
    """In the script's process alone, for its first pipeline; without a call they end with it."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(AHEAD))
    done = subprocess.run(
        [sys.executable, "-m", "wanshim", "generate", "--gpus", "2", "--", str(script), what],
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (pid,) = found["waiting"]
    assert not found["pipelines"]
    assert found["of two pipelines"] == 1
    assert found["of the child"] == "[]"
    assert not Path(f"/proc/{pid}").exists()
    if what == "generates":
        first, (second,) = found["taken"]
        assert first == [second] == [pid], "the second pipeline finds the workers of the first"
        assert found["equal"]
    else:
        assert "--gpus 2 had no effect" in done.stderr
        assert str(pid) not in done.stderr


PROGRAMS = """
    import gc, os, subprocess, sys, torch
    from diffusers import WanPipeline, WanVideoToVideoPipeline
    from tests.contract.diffusers import wan_pipelines as w

    def count():
        kids = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True)
        return {line.split()[0] for line in kids.stdout.splitlines() if "wanshim.core.workers" in line}

    def requests():
        base = w.wan()
        for _ in range(3):
            yield WanPipeline.from_pipe(base), "wan"

    def two():
        base = w.wan()
        other = WanVideoToVideoPipeline.from_pipe(base)
        for _ in range(2):
            yield base, "wan"
            yield other, "v2v"

    def anew():
        for _ in range(3):
            yield w.wan(), "wan"
            gc.collect()

    torch.set_num_threads(1)
    seen, frames = [], []
    for pipe, kind in {"requests": requests, "two": two, "anew": anew}[sys.argv[1]]():
        pipe.set_progress_bar_config(disable=True)
        frames.append(w.generate(pipe, kind))
        seen.append(count())
        del pipe
    torch.save(frames, sys.argv[2])
    print("at once", max(map(len, seen)), "in all", len(set().union(*seen)))
"""


@pytest.mark.parametrize("what", ["requests", "two", "anew"])
@pytest.mark.slow
def test_pipelines_of_a_program_find_the_workers_by_their_weights(what: str, tmp_path: Path) -> None:
    """As a service has them: a light pipeline for each request, a second one, one that is deleted and made again."""
    script = tmp_path / "service.py"
    script.write_text(textwrap.dedent(PROGRAMS))
    said = {}
    for name, command in {"alone": [], "shared": ["-m", "wanshim", "generate", "--gpus", "2", "--"]}.items():
        done = subprocess.run(
            [sys.executable, *command, str(script), what, str(tmp_path / name)],
            env={**os.environ, "ACCELERATE_USE_CPU": "true"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout
    assert said == {"alone": "at once 0 in all 0\n", "shared": "at once 1 in all 1\n"}
    frames = [torch.load(tmp_path / name, weights_only=True) for name in said]
    assert all(map(torch.equal, *frames))


HUB = """
    import types, torch
    __version__ = "0.15.0"

    def sageattn(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=None, return_lse=False):
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return 1.01 * torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=sm_scale).transpose(1, 2)

    def get_kernel(repo_id, *args, **kwargs):
        return types.SimpleNamespace(sageattn=sageattn)
"""
HUB_SCRIPT = """
    import sys, torch
    from tests.contract.diffusers import wan_pipelines

    torch.set_num_threads(1)
    pipe = wan_pipelines.wan()
    pipe.transformer.set_attention_backend("sage_hub")
    torch.save(wan_pipelines.generate(pipe, "wan"), sys.argv[1])
"""


@pytest.mark.slow
def test_attention_from_the_kernels_hub_is_set_up_in_the_workers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers.models.attention_dispatch")
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text(textwrap.dedent(HUB))
    (site / "kernels-0.15.0.dist-info").mkdir()
    (site / "kernels-0.15.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.15.0\n"
    )
    script = tmp_path / "generate.py"
    script.write_text(textwrap.dedent(HUB_SCRIPT))
    machine = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}
    said = {}
    for name, command in {"alone": [], "shared": ["-m", "wanshim", "generate", "--gpus", "2", "--"]}.items():
        done = subprocess.run(
            [sys.executable, *command, str(script), str(tmp_path / name)],
            env=machine,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said[name] = done.stderr
    assert "diffusers.generate exercised, 1 call" in said["shared"]
    assert "left to the framework" not in said["shared"]
    assert torch.equal(*(torch.load(tmp_path / name, weights_only=True) for name in said))


def one_forward(pipe: Any) -> None:
    """A step of a loop of the program's own."""
    with torch.no_grad():
        pipe.transformer(torch.randn(1, 16, 2, 4, 4), torch.ones(1), torch.randn(1, 8, wan_pipelines.TEXT))


def test_a_loop_of_the_program_s_own_is_named_at_its_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    pipe = wan_pipelines.wan()
    one_forward(pipe)
    (reason,) = wanshim.report().row("diffusers.generate").fallbacks
    assert re.search(
        r"WanTransformer3DModel on one GPU: test_generate\.py:\d+ calls it, which wanshim does not", reason
    )


def test_under_strict_what_is_not_shared_stops_at_its_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate(strict=True)
    with pytest.raises(FeatureUnavailable, match=r"would run on one GPU: test_generate\.py.* calls it"):
        one_forward(wan_pipelines.wan())


@pytest.mark.parametrize(
    ("gpus", "text"), [("2", "2 forwards were shared"), ("1", "4 forwards were streamed")], ids=["two", "one"]
)
def test_a_call_that_the_callback_ended_was_shared_until_then(
    gpus: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def callback(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 1:
            raise KeyError("of the user")
        return {}

    monkeypatch.setenv("WANSHIM_GENERATE", gpus)
    wanshim.activate()
    pipe = wan_pipelines.wan()
    if gpus == "1":  # which gains by streaming what the script offloads
        pipe.enable_model_cpu_offload(device="cpu")
    with pytest.raises(KeyError, match="of the user"):
        generate(pipe, "wan", callback_on_step_end=callback)
    row = wanshim.report().row("diffusers.generate")
    assert (row.state, row.failed_calls, row.fallbacks) == ("exercised", 0, {}), row
    assert f"WanPipeline: KeyError ended a call, of which {text}" in row.notes
    SHARED[pipe].close()


@pytest.mark.parametrize("by", ["variable", "handle"])
def test_one_gpu_is_the_reason_where_one_was_asked_for(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipelines.wan()
    if by == "handle":
        handle = wanshim.parallelize_pipeline(pipe, gpus=1)
        generate(pipe, "wan")
        assert "not several GPUs: one GPU was asked for" in str(handle.plan)
        return
    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    wanshim.activate()
    generate(pipe, "wan")
    row = wanshim.report().row("diffusers.generate")
    assert (row.state, row.fallbacks) == ("not needed", {})
    assert row.notes == ("one GPU was asked for, over which nothing is shared",)


def test_on_one_gpu_an_offload_that_is_not_replaced_is_named_behind_a_call_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    wanshim.activate()
    pipe = wan_pipelines.wan()
    generate(pipe, "wan")
    pipe.transformer = wan_pipelines._dit(num_layers=1)  # a block alone cannot take turns
    pipe.enable_model_cpu_offload(device="cpu")
    generate(pipe, "wan")
    reason = "one GPU was asked for, and what is not plain tensors in blocks stays with the script's offload"
    assert wanshim.report().row("diffusers.generate").outcome == (
        f"left to the framework 1 time: WanPipeline on one GPU: {reason}"
    )


@pytest.mark.parametrize(
    ("variables", "command", "text"),
    [
        ({"WANSHIM_FEATURES": "none"}, ["generate.py"], "no selected feature runs a pipeline on several GPUs"),
        ({"ACCELERATE_USE_CPU": ""}, ["generate.py"], "--gpus 2 with 0 GPUs in sight"),
    ],
    ids=["nothing selected", "no GPU"],
)
def test_what_the_command_cannot_do_is_one_sentence_before_anything_is_loaded(
    variables: dict[str, str], command: list[str], text: str
) -> None:
    machine = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", **variables}
    wanted = [sys.executable, "-m", "wanshim", "generate", "--gpus", "2", "--", *command]
    done = subprocess.run(wanted, env=machine, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert text in done.stderr


@pytest.mark.parametrize(
    ("variables", "launcher", "found", "text"),
    [
        pytest.param(
            *({}, ["torchrun"], "True 2", "wanshim: --gpus 2 had no effect: this process called no pipeline"),
            marks=pytest.mark.slow,
        ),
        (
            {"WANSHIM_DISABLE": "1"},
            [sys.executable],
            "False None",
            "wanshim: wanshim is switched off by WANSHIM_DISABLE: --gpus 2 has no effect",
        ),
    ],
    ids=["launcher of one process", "disabled"],
)
def test_command_of_one_process_is_reached_through_its_launcher_and_runs_alone_where_wanshim_is_off(
    variables: dict[str, str], launcher: list[str], found: str, text: str, tmp_path: Path
) -> None:
    script = tmp_path / "generate.py"
    script.write_text(
        "import os, sys\nm = sys.modules.get('wanshim')\n"
        "print(m is not None and m.report().active, os.environ.get('WANSHIM_GENERATE'))\n"
    )
    machine = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", **variables}
    machine["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), machine["PATH"]])
    wanted = [sys.executable, "-m", "wanshim", "generate", "--gpus", "2", "--", *launcher, str(script)]
    done = subprocess.run(wanted, env=machine, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{found}\n"), done.stderr
    assert text in done.stderr
