"""`diffsynth.generate`: frames of two processes are those of one, by guidance bit for bit, by tokens up to rounding."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

import wanshim
from tests.contract.diffsynth import variants, wan_pipelines
from tests.contract.diffsynth.wan_pipelines import generate
from tests.unit.workers.forked import forked_in_module  # noqa: F401, a fixture
from wanshim.adapters.diffsynth.generate import bind
from wanshim.core.decoding import vae_cache
from wanshim.core.generation import Request, SharedPipeline
from wanshim.core.workers.packing import pack, unpack
from wanshim.errors import FeatureUnavailable, ModelInvalid
from wanshim.patching.pipeline_call import SHARED

pytestmark = pytest.mark.timeout(600)  # a worker imports torch and diffsynth


@pytest.fixture(scope="module")
def shared(forked_in_module: None) -> Iterator[SharedPipeline]:  # noqa: F811
    """One worker for pipelines of every kind: it holds whatever the last call had."""
    made = SharedPipeline(Request(gpus=2))
    yield made
    made.close()


def run(
    shared: SharedPipeline, pipe: Any, kind: str, way: tuple[int, int], asked: bool = True, **changed: Any
) -> torch.Tensor:
    shared.request = Request(gpus=2, at_most=way if asked else None)
    frames = shared.run(
        partial(bind, pipe, **{**wan_pipelines.arguments(kind), **changed}), partial(generate, pipe, kind, **changed)
    )
    assert shared.plan is not None
    assert (shared.plan.guidance, shared.plan.sequence) == way
    return frames


FEW = ("i2v", "pair")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.sweep] * (kind not in FEW)) for kind in wan_pipelines.MADE],
)
def test_frames_of_two_processes_are_those_of_one(shared: SharedPipeline, kind: str) -> None:
    pipe = wan_pipelines.MADE[kind]()
    expected = generate(pipe, kind)
    before, calls = shared.shared_forwards, shared.shared_vae_calls
    assert torch.equal(expected, run(shared, pipe, kind, (2, 1)))
    assert shared.shared_forwards - before == 3
    assert shared.plan is not None
    assert set(shared.plan.peaks) == {"cpu"}, "the memory of a forward is known"
    assert (run(shared, pipe, kind, (1, 2)) - expected).abs().max() <= 1e-5
    assert shared.shared_forwards - before == 9
    assert shared.shared_vae_calls - calls >= 2, "the decode of both"
    assert torch.equal(expected, generate(pipe, kind)), "nothing is left in the models"


@pytest.mark.parametrize("kind", ["t2v", "i2v", "vace"])
def test_merged_guidance_goes_over_processes_by_its_tokens(shared: SharedPipeline, kind: str) -> None:
    pipe = wan_pipelines.MADE[kind]()
    expected = generate(pipe, kind, cfg_merge=True)
    found = run(shared, pipe, kind, (1, 2), asked=False, cfg_merge=True)
    assert (found - expected).abs().max() <= 1e-5
    assert "cfg_merge makes one forward of a step's two" in str(shared.plan)


@pytest.mark.parametrize("way", [(2, 1), (1, 2)], ids=["guidance", "tokens"])
def test_what_the_progress_bar_of_a_program_changes_between_steps_is_computed(
    way: tuple[int, int], shared: SharedPipeline
) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    weight = pipe.dit.blocks[0].ffn[0].weight
    own = weight.clone()

    def louder(steps: Iterable[Any]) -> Iterator[Any]:
        for step in steps:
            yield step
            weight.mul_(1.5)

    plain, expected = generate(pipe, "t2v"), generate(pipe, "t2v", progress_bar_cmd=louder)
    weight.copy_(own)
    before = shared.shared_forwards
    found = run(shared, pipe, "t2v", way, progress_bar_cmd=partial(louder))
    assert shared.shared_forwards - before == (3 if way == (2, 1) else 6)
    assert not torch.equal(plain, expected)
    assert torch.equal(expected, found) if way == (2, 1) else (found - expected).abs().max() <= 1e-5


def of_the_bar(pipe: Any, forward: Callable[[], object], changed: dict[str, Any]) -> None:
    def bar(steps: Iterable[Any]) -> Iterator[Any]:
        for step in steps:
            yield step
            forward()

    changed["progress_bar_cmd"] = bar


def of_a_unit(pipe: Any, forward: Callable[[], object], changed: dict[str, Any]) -> None:
    from diffsynth.diffusion.base_pipeline import PipelineUnit

    class Unit(PipelineUnit):  # type: ignore[misc]
        def process(self, pipe: Any) -> dict[str, Any]:
            forward()
            return {}

    pipe.units.append(Unit(input_params=()))


def of_the_pictures(pipe: Any, forward: Callable[[], object], changed: dict[str, Any]) -> None:
    pipe.vae_output_to_video = lambda video: (forward(), video)[1]


@pytest.mark.parametrize("way", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)], ids=["guidance", "tokens"])
@pytest.mark.parametrize("place", [of_the_bar, of_a_unit, of_the_pictures])
def test_forward_that_the_program_calls_within_a_call_is_none_of_the_loop_s(
    place: Callable[..., None], way: tuple[int, int], shared: SharedPipeline
) -> None:
    """As a preview of the video does."""
    given = {"latents": torch.randn(1, 16, 2, 4, 4), "timestep": torch.ones(1), "context": torch.randn(1, 8, 32)}

    def made(over: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        pipe, own, changed = wan_pipelines.MADE["t2v"](), list[torch.Tensor](), dict[str, Any]()
        place(pipe, lambda: own.append(pipe.model_fn(dit=pipe.dit, **given).clone()), changed)
        return [over(pipe, **changed), *own]

    expected = made(lambda pipe, **changed: generate(pipe, "t2v", **changed))
    found = made(lambda pipe, **changed: run(shared, pipe, "t2v", way, **changed))
    assert len(expected) > 1
    assert all(map(torch.equal, expected[1:], found[1:])), "the program's own"
    assert (found[0] - expected[0]).abs().max() <= (0 if way == (2, 1) else 1e-5)


def test_call_of_the_program_s_within_a_call_is_none_of_the_loop_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> list[torch.Tensor]:
        pipe, previews = wan_pipelines.MADE["t2v"](), list[torch.Tensor]()

        def bar(steps: Iterable[Any]) -> Iterator[Any]:
            for step in steps:
                yield step
                steps_of_the_call = dict(vars(pipe.scheduler))
                previews.append(generate(pipe, "t2v", cfg_scale=1.0, num_inference_steps=1))
                vars(pipe.scheduler).update(steps_of_the_call)

        return [generate(pipe, "t2v", progress_bar_cmd=bar), *previews]

    expected = made()
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate(strict=True)
    found = made()
    assert len(expected) == len(found) > 1
    assert all(map(torch.equal, expected, found))


def test_subclass_whose_call_takes_other_arguments_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> torch.Tensor:
        class Short(type(wan_pipelines.MADE["t2v"]())):  # type: ignore[misc]
            def __call__(self, text: str, **more: Any) -> Any:
                return super().__call__(prompt=text, **more)

        pipe = wan_pipelines.MADE["t2v"]()
        pipe.__class__ = Short
        size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 1}
        frames = pipe("a street", negative_prompt="blur", seed=0, tiled=False, **size)
        assert isinstance(frames, torch.Tensor)
        return frames

    expected = made()
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate(strict=True)
    assert torch.equal(expected, made())
    assert "Short on cpu, cpu: guidance over 2" in str(wanshim.report().row("diffsynth.generate").notes)


def test_subclass_of_the_program_s_is_served_in_python(request: pytest.FixtureRequest) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    expected = generate(pipe, "t2v", num_inference_steps=1)

    class Mine(type(pipe)):  # type: ignore[misc]
        pass

    class Short(Mine):
        def __call__(self, text: str, **more: Any) -> Any:
            return super().__call__(prompt=text, **more)

    pipe.__class__ = Mine
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    assert torch.equal(expected, generate(pipe, "t2v", num_inference_steps=1))
    assert handle.plan.guidance == 2
    handle.remove()
    pipe.__class__ = Short
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    with pytest.raises(ModelInvalid, match=r"Short cannot use several GPUs: it cannot be read: .*argument 'text'"):
        pipe(text="a street")


def test_merged_guidance_has_no_tea_cache_as_on_one_gpu(shared: SharedPipeline) -> None:
    """DiffSynth drops it there."""
    pipe, changed = wan_pipelines.MADE["t2v"](), {"cfg_merge": True, **TEA_CACHE}
    expected = generate(pipe, "t2v", **changed)
    assert (run(shared, pipe, "t2v", (1, 2), asked=False, **changed) - expected).abs().max() <= 1e-5


def test_decode_goes_over_processes_before_one_computes_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one process gains by the decode, too."""
    pipe = wan_pipelines.MADE["t2v"]()
    expected = generate(pipe, "t2v")
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    monkeypatch.setattr(vae_cache, "gains_alone", lambda given: True)
    wanshim.activate(strict=True)
    assert torch.equal(generate(pipe, "t2v"), expected)
    assert SHARED[pipe].shared_vae_calls == 1
    assert not wanshim.report().row("diffsynth.vae_decode").notes


def test_decode_that_a_program_has_put_on_the_class_is_called(
    shared: SharedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    own = type(pipe.vae).decode
    monkeypatch.setattr(type(pipe.vae), "decode", lambda self, *args, **kwargs: own(self, *args, **kwargs) / 2)
    expected = generate(pipe, "t2v")
    assert torch.equal(expected, run(shared, pipe, "t2v", (2, 1)))


def test_tiles_of_diffsynth_are_its_own(shared: SharedPipeline) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    expected, before = generate(pipe, "t2v", tiled=True), shared.shared_vae_calls
    assert torch.equal(expected, run(shared, pipe, "t2v", (2, 1), tiled=True))
    assert shared.shared_vae_calls == before


def test_windows_of_frames_go_over_two_by_guidance(shared: SharedPipeline) -> None:
    pipe, windows = wan_pipelines.MADE["i2v"](), {"sliding_window_size": 2, "sliding_window_stride": 1}
    expected, size = generate(pipe, "i2v", num_frames=13), {"num_frames": 13, **windows}
    in_windows = generate(pipe, "i2v", **size)
    assert not torch.equal(expected, in_windows)
    assert torch.equal(in_windows, run(shared, pipe, "i2v", (2, 1), asked=False, **size))


@pytest.mark.slow
def test_without_guidance_tokens_go_over_processes_at_an_odd_size(shared: SharedPipeline) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    size = {"height": 48, "width": 80, "num_frames": 9, "cfg_scale": 1.0}
    expected = generate(pipe, "t2v", **size)
    assert (run(shared, pipe, "t2v", (1, 2), asked=False, **size) - expected).abs().max() <= 1e-5
    assert "the guidance scale switches guidance off" in str(shared.plan)


@pytest.mark.parametrize("name", ["s2v", "vap"])
def test_what_sees_all_tokens_goes_over_two_by_guidance(shared: SharedPipeline, name: str) -> None:
    """Of its forward alone: the units of these pipelines need models whose classes have no sizes to set."""
    variant = variants.tiny(name)
    pipe = wan_pipelines.MADE["t2v"]()
    for part, model in variant.modules().items():
        setattr(pipe, part, model.eval())
    models = {part: getattr(pipe, part) for part in pipe.in_iteration_models}

    def step() -> list[torch.Tensor]:
        given = {**variant.inputs, "timestep": torch.full((1,), 500.0), "prompt": object()}
        with torch.no_grad():
            return [
                pipe.model_fn(**models, **{**given, "context": c}) for c in (given["context"], 2 * given["context"])
            ]

    expected = step()
    shared.request = Request(gpus=2)
    found = shared.run(partial(bind, pipe), step)
    assert shared.plan is not None
    assert (shared.plan.guidance, shared.plan.sequence) == (2, 1)
    assert bind(pipe).no_sequence
    assert all(map(torch.equal, expected, found))
    assert not torch.equal(*found)


def test_the_adapter_of_animate_can_be_copied() -> None:
    """Its class, which has no sizes to set, without its weights."""
    from diffsynth.models.wan_video_animate_adapter import WanAnimateAdapter

    pipe = wan_pipelines.MADE["t2v"]()
    with torch.device("meta"):
        pipe.animate_adapter = WanAnimateAdapter()
    assert "animate_adapter works between the blocks" in bind(pipe).no_sequence
    packed, tensors = pack(pipe.animate_adapter, torch.device("meta"))
    assert type(unpack(packed, tensors)) is WanAnimateAdapter


def test_lora_that_is_fused_between_calls_reaches_the_copy(shared: SharedPipeline) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    before = run(shared, pipe, "t2v", (2, 1))
    width = pipe.dit.blocks[0].self_attn.q.weight.size(0)
    name = "blocks.0.self_attn.q.lora_{}.default.weight"
    lora = {name.format("A"): torch.randn(2, width), name.format("B"): torch.randn(width, 2)}
    pipe.load_lora(pipe.dit, state_dict=lora)
    expected = generate(pipe, "t2v")
    assert not torch.equal(before, expected)
    assert torch.equal(expected, run(shared, pipe, "t2v", (2, 1)))


@pytest.mark.slow
@pytest.mark.sweep
def test_blocks_that_are_compiled_are_compiled_in_the_copy(shared: SharedPipeline) -> None:
    """By Inductor, whose bits are not those of the blocks as they were."""
    pipe = wan_pipelines.MADE["t2v"]()
    if hasattr(pipe, "compile_pipeline"):
        pipe.compile_pipeline(compile_models=["dit"], dynamic=False)
    else:  # earlier releases: what that does
        for block in pipe.dit.blocks:
            block.compile(dynamic=False)
    expected = generate(pipe, "t2v")
    assert torch.equal(expected, run(shared, pipe, "t2v", (2, 1)))
    longer = generate(pipe, "t2v", num_frames=9)
    assert torch.equal(longer, run(shared, pipe, "t2v", (2, 1), num_frames=9))


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_that_torchao_quantized_are_copied_as_they_are(shared: SharedPipeline, name: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    pipe = wan_pipelines.MADE["t2v"]()
    plain = generate(pipe, "t2v")
    torchao.quantize_(pipe.dit, getattr(torchao, name)())
    expected = generate(pipe, "t2v")
    assert not torch.equal(plain, expected)
    assert torch.equal(expected, run(shared, pipe, "t2v", (2, 1)))


def hooked(pipe: Any) -> None:
    pipe.dit.blocks[0].register_forward_hook(lambda *_: None)


class Quantized(torch.Tensor):
    """A tensor of a class of its own, as libraries that quantize make them."""


def quantized(pipe: Any) -> None:
    weight = pipe.dit.head.head.weight
    pipe.dit.head.head.weight = torch.nn.Parameter(weight.detach().as_subclass(Quantized), False)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "usp": (lambda pipe: setattr(pipe, "use_unified_sequence_parallel", True), "use_usp: DiffSynth shards"),
    "hook": (hooked, r"dit \(blocks.0\) has forward hooks"),
    "forward": (lambda pipe: setattr(pipe.dit, "forward", partial(pipe.dit.forward)), "dit has a forward of its own"),
    "weights": (quantized, "Quantized is no class of an installed package"),
    "class": (lambda pipe: setattr(pipe, "dit", torch.nn.Linear(2, 2)), "dit is a Linear: not a Wan DiT that is known"),
    "function": (lambda pipe: setattr(pipe, "model_fn", print), "its model_fn is not DiffSynth's"),
    "no dit": (lambda pipe: setattr(pipe, "dit", None), "it has no dit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    change, text = REFUSED[name]
    pipe = wan_pipelines.MADE["t2v"]()
    change(pipe)
    with pytest.raises(ModelInvalid, match=f"WanVideoPipeline cannot use several GPUs: .*{text}"):
        wanshim.parallelize_pipeline(pipe, gpus=2)
    vars(pipe.dit or pipe).pop("forward", None)  # while it lives, the seam on its class counts as displaced


def test_music_is_refused_by_name() -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    pipe.dit = variants.tiny("wantodance").dit
    with pytest.raises(ModelInvalid, match="WanToDance writes the music into its DiT"):
        wanshim.parallelize_pipeline(pipe, gpus=2)


TEA_CACHE = {"tea_cache_l1_thresh": 1e6, "tea_cache_model_id": "Wan2.1-T2V-1.3B"}  # skips all that it may


@pytest.mark.parametrize("cfg_scale", [5.0, pytest.param(1.0, marks=pytest.mark.sweep)])
def test_frames_are_those_of_tea_cache_on_one_gpu(cfg_scale: float, request: pytest.FixtureRequest) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    own_bar = inspect.signature(type(pipe).__call__).parameters["progress_bar_cmd"].default
    steps = {"num_inference_steps": 5, "cfg_scale": cfg_scale, "progress_bar_cmd": own_bar}
    without = generate(pipe, "t2v", **steps)
    expected = [generate(pipe, "t2v", **steps, **TEA_CACHE) for _ in range(2)]
    assert not torch.equal(expected[0], without)
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    found = [generate(pipe, "t2v", **steps, **TEA_CACHE) for _ in range(2)]
    assert all(map(torch.equal, expected, found))
    assert (handle.plan.guidance, handle.plan.sequence) == (2 if cfg_scale > 1 else 1, 1)
    assert torch.equal(generate(pipe, "t2v", **steps), without) or cfg_scale == 1.0  # whose tokens go over both


def test_a_call_that_is_not_served_runs_on_one_gpu_and_under_strict_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**TEA_CACHE, "progress_bar_cmd": lambda steps: (step for step in steps)}
    text = "code between steps may change what TeaCache has kept"
    pipe = wan_pipelines.MADE["t2v"]()
    expected = generate(pipe, "t2v", num_inference_steps=1, **changed)
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    assert torch.equal(expected, generate(pipe, "t2v", num_inference_steps=1, **changed))
    (row,) = [row for row in wanshim.report().rows if row.feature == "diffsynth.generate"]
    assert any(f"on one GPU: {text}" in note for note in row.notes)
    wanshim.deactivate()
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.activate()
    with pytest.raises(FeatureUnavailable, match=f"WanVideoPipeline would run on one GPU: {text}"):
        generate(pipe, "t2v", num_inference_steps=1, **changed)
    assert (
        wanshim.report().row("diffsynth.generate").outcome
        == "without effect, 1 call of WanVideoPipeline.__call__, of which 1 failed"
    )


def test_arguments_that_the_pipeline_does_not_take_are_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    with pytest.raises(TypeError) as expected:
        generate(pipe, "t2v", unknown=1)
    assert "WanVideoPipeline.__call__" in str(expected.value)
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate(strict=True)
    with pytest.raises(TypeError, match=f"^{re.escape(str(expected.value))}$"):
        generate(pipe, "t2v", unknown=1)
    assert wanshim.report().row("diffsynth.generate").calls == 0


@pytest.mark.parametrize("name", REFUSED)
def test_under_strict_what_is_not_served_stops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, text = REFUSED[name]
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.activate()
    pipe = wan_pipelines.MADE["t2v"]()
    change(pipe)
    with pytest.raises(FeatureUnavailable, match=f"WanVideoPipeline would run on one GPU: .*{text}"):
        generate(pipe, "t2v")
    vars(pipe.dit or pipe).pop("forward", None)  # while it lives, the seam on its class counts as displaced


# What DiffSynth itself runs on the CPU with these changes.
@pytest.mark.parametrize("name", ["forward", *(pytest.param(n, marks=pytest.mark.slow) for n in ("hook", "weights"))])
def test_what_is_not_served_runs_on_one_gpu_and_the_report_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, text = REFUSED[name]
    pipe = wan_pipelines.MADE["t2v"]()
    change(pipe)
    expected = generate(pipe, "t2v", num_inference_steps=1)
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    assert torch.equal(expected, generate(pipe, "t2v", num_inference_steps=1))
    (row,) = [row for row in wanshim.report().rows if row.feature == "diffsynth.generate"]
    assert any(re.search(f"on one GPU: .*{text}", note) for note in row.notes), row.notes
    vars(pipe.dit).pop("forward", None)


def test_error_of_a_call_on_one_gpu_is_the_program_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipelines.MADE["t2v"]()
    hooked(pipe)
    pipe.text_encoder = None
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    with pytest.raises(TypeError) as caught:
        generate(pipe, "t2v")
    assert caught.value.__context__ is None


SCRIPT = """
    import sys, torch
    from tests.contract.diffsynth import wan_pipelines

    print("the program runs")
    torch.set_num_threads(1)
    pipe = wan_pipelines.MADE["pair"]()
    torch.save(wan_pipelines.generate(pipe, "pair"), sys.argv[1])
"""


@pytest.mark.sweep  # test_generate_vram starts one, too
@pytest.mark.road
def test_an_unmodified_script_has_the_same_frames_by_one_command(tmp_path: Path) -> None:
    """No `__main__` guard, and helpers beside the script."""
    script = tmp_path / "generate.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-m", "wanshim", "generate", "--gpus", "2", "--", str(script), str(tmp_path / "frames")],
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the program runs\n"
    assert "diffsynth.generate: WanVideoPipeline on cpu, cpu: guidance over 2" in done.stderr
    pipe = wan_pipelines.MADE["pair"]()
    assert torch.equal(generate(pipe, "pair"), torch.load(tmp_path / "frames", weights_only=True))


def test_two_pipelines_around_one_dit_share_its_copy(shared: SharedPipeline) -> None:
    """As a service makes a pipeline for each request, of models that are loaded once."""
    pipe, other = wan_pipelines.MADE["t2v"](), wan_pipelines.MADE["t2v"]()
    other.dit, other.vae = pipe.dit, pipe.vae
    again = SharedPipeline(Request(gpus=2))
    expected = generate(pipe, "t2v")
    assert torch.equal(expected, run(shared, pipe, "t2v", (2, 1)))
    assert shared._workers is not None
    pids, held = shared.pids, shared._workers.num_bytes(0)
    assert torch.equal(expected, run(again, other, "t2v", (2, 1)))
    assert again.pids == pids
    assert shared._workers.num_bytes(0) == held


def test_a_loop_of_the_program_s_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffsynth.pipelines import wan_video

    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate()
    pipe = wan_pipelines.MADE["t2v"]()
    given = {"latents": torch.randn(1, 16, 2, 4, 4), "timestep": torch.ones(1)}
    width = pipe.dit.text_embedding[0].in_features
    with torch.no_grad():
        wan_video.model_fn_wan_video(pipe.dit, context=torch.randn(1, 8, width), **given)
    (reason,) = wanshim.report().row("diffsynth.generate").fallbacks
    assert re.search(r"WanModel on one GPU: test_generate\.py:\d+ calls it, which wanshim does not share", reason)


def test_what_a_scheduler_of_a_program_changes_between_steps_is_computed(shared: SharedPipeline) -> None:
    def call(over: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        pipe = wan_pipelines.MADE["t2v"]()
        own = pipe.scheduler.step

        def step(*args: Any, **kwargs: Any) -> Any:
            pipe.dit.blocks[0].ffn[0].weight.mul_(1.5)
            return own(*args, **kwargs)

        pipe.scheduler.step = step
        return over(pipe)

    bar = {"progress_bar_cmd": tqdm}  # of an installed package: it changes nothing
    expected, before = call(lambda pipe: generate(pipe, "t2v", **bar)), shared.shared_forwards
    assert not torch.equal(expected, generate(wan_pipelines.MADE["t2v"](), "t2v"))
    assert torch.equal(expected, call(lambda pipe: run(shared, pipe, "t2v", (2, 1), **bar)))
    assert shared.shared_forwards - before == 3
