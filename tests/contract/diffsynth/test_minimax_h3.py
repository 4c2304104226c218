"""MiniMax-H3's blocks, trained by the table of its family: the same numbers, the same files."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffsynth.core import ModelConfig
from diffsynth.diffusion import runner

import wanshim
from tests.compiling import use_aot_eager

pytest.importorskip("torchaudio", reason="DiffSynth's MiniMax-H3 imports it")
pytest.importorskip("diffsynth.models.minimax_h3_dit", reason="this release has no MiniMax-H3")

from diffsynth.models import model_loader
from diffsynth.models.minimax_h3_dit import MiniMaxH3DiT
from diffsynth.models.minimax_h3_dit_comfy import MiniMaxH3DiTComfy, MiniMaxH3DiTComfyPruned
from diffsynth.pipelines import minimax_h3_audio_video

from tests.contract.diffsynth import minimax_h3 as h3
from tests.contract.diffsynth import vram_management
from tests.contract.diffsynth.stages import stage_devices
from tests.contract.diffsynth.training import FEATURE, Logger, Samples
from tests.unit.workers.forked import forked_in_module  # noqa: F401, a fixture
from wanshim import settings
from wanshim.adapters.diffsynth import checkpoint_offload, compiled_blocks, kept_attention
from wanshim.adapters.diffsynth.compiled_blocks import compile_blocks
from wanshim.adapters.diffsynth.generate import bind
from wanshim.adapters.diffsynth.resuming.run import ended
from wanshim.adapters.diffsynth.splitting import facts as run_facts
from wanshim.adapters.diffsynth.splitting.job import read_job
from wanshim.adapters.diffsynth.splitting.micro_batch import micro_batch
from wanshim.adapters.diffsynth.splitting.minimax_h3 import FAMILY
from wanshim.adapters.diffsynth.training_road import Row, TrainingCall
from wanshim.core.generation import Request, SharedPipeline
from wanshim.core.model_split import split_of
from wanshim.core.sequence import sequence_of
from wanshim.core.strategy import Limits, decide
from wanshim.core.streaming import stream_model, stream_of
from wanshim.errors import FeatureUnavailable, PlacementInvalid
from wanshim.undo import Undo

KINDS = {
    "plain": {},
    "control net": {"control": True},
    "guidance": {"cfg_scale": 2.0},
    "sizes": {"sizes": {2: {"num_frames": 39, "text": 9}}},
}


def made(kind: str = "plain", dtype: torch.dtype = torch.bfloat16) -> h3.Training:
    parts = {"controlnet": h3.control_net(dtype)} if kind == "control net" else {}
    return h3.Training(h3.pipe_of(h3.lora_model(dtype), **parts), **KINDS[kind])


@cache
def plain_step(kind: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Of DiffSynth alone."""
    return h3.step(made(kind, dtype))


SWEEPS = [pytest.mark.slow, pytest.mark.sweep]


@pytest.mark.parametrize(
    "split_at", [*(pytest.param(points, marks=SWEEPS) for points in (None, (1,), (3,))), (1, 3)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_split_gives_the_unsplit_loss_and_gradients(kind: str, split_at: tuple[int, ...] | None) -> None:
    devices = tuple(stage_devices("cpu", len(split_at or (2,)) + 1))
    module = made(kind)
    handle = FAMILY.split(module.pipe, devices, split_at)
    found = h3.step(module)
    assert handle.plan.stages[-1].last == 4
    assert all(map(torch.equal, plain_step(kind), found))
    handle.remove()


VIDEO = {"height": 64, "width": 96, "num_frames": 22, "use_gradient_checkpointing": True}
REST = {
    "learning_rate": 1e-2, "weight_decay": 0.01, "dataset_num_workers": 0, "save_steps": 2, "num_epochs": 2,
    "enable_model_cpu_offload": False, "enable_optimizer_cpu_offload": False, "cpu_offload_split_threshold": None,
    "customized_optimizer": None,
}  # fmt: skip


def train(
    folder: Path, accumulation: int = 2, kind: str = "plain", fault: int | None = None
) -> tuple[dict[str, bytes], h3.Training]:
    """Two epochs with a checkpoint every second micro-batch: the files and the losses.

    Args:
        fault: the forward that runs out of memory.
    """
    torch.manual_seed(11)
    module = made(kind)
    module.register_forward_pre_hook(lambda *_: _fail_at(module, fault))
    runner.launch_training_task(
        Accelerator(cpu=True, gradient_accumulation_steps=accumulation),
        Samples(3),
        module,
        Logger(folder),
        args=argparse.Namespace(**VIDEO | REST),
    )
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
    files["losses"] = torch.stack(module.losses).numpy().tobytes()
    return files, module


@cache
def plain(accumulation: int = 2, kind: str = "plain") -> dict[str, bytes]:
    """DiffSynth's own run, before wanshim is active."""
    with TemporaryDirectory() as folder:
        return train(Path(folder), accumulation, kind)[0]


def notes(feature: str = FEATURE) -> str:
    return "\n".join(wanshim.report(strict=False).row(feature).notes)


def _fail_at(module: h3.Training, fault: int | None) -> None:
    if len(module.seen) == fault:
        raise torch.OutOfMemoryError("no room for this one")


def everything_said() -> str:
    return "\n".join(notes(row.feature) for row in wanshim.report(strict=False).rows)


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kept_attention, "MIN_BYTES", 1)
    monkeypatch.setattr(checkpoint_offload, "MIN_BYTES", 1)
    yield
    wanshim.deactivate()


# name -> its variables, and what the report says of it
RUNS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "split": ({"DEVICES": "cpu:0,cpu:1", "PIPELINE": "0"}, ("split into 2 stages", "predicted peak for 128 tokens")),
    "split in three": ({"DEVICES": "cpu,cpu,cpu", "PIPELINE": "0"}, ("split into 3 stages",)),
    "pipeline": ({"DEVICES": "cpu,cpu"}, ("2 micro-batches in a pipeline of 2 stages",)),
    "streamed": ({"PLAN": "stream:3"}, ("streaming 3 of 4 blocks to cpu",)),
    "streamed, checkpoints offloaded": ({"PLAN": "stream:4", "OFFLOAD": "on"}, ("checkpoint inputs",)),
    "attention kept": ({"PLAN": "auto", "KEEP": "attention"}, ("48 were used again",)),
    "attention kept in host memory": ({"PLAN": "stream", "KEEP": "attention", "OFFLOAD": "on"}, ("of host memory",)),
    "blocks kept": ({"PLAN": "auto", "KEEP": "blocks"}, ("4 blocks ran 24 times without being computed again",)),
    "checkpoints offloaded": ({"OFFLOAD": "on"}, ("24 checkpoint inputs",)),
}


QUICK = ("streamed",)
IN_SLOW = ("split", "attention kept", "pipeline", "blocks kept", "attention kept in host memory")


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=() if run in QUICK else pytest.mark.slow if run in IN_SLOW else SWEEPS) for run in RUNS],
)
def test_training_writes_the_files_of_diffsynth_alone(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain()
    variables, said = RUNS[run]
    for name, value in {"STRICT": "1", "KEEP": "off", **variables}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate()
    found, module = train(tmp_path)
    assert len(set(expected.values())) == 4  # it learns
    assert found == expected
    assert (split_of(module.pipe.dit) is not None) is ("DEVICES" in variables)
    assert (stream_of(module.pipe.dit) is not None) is variables.get("PLAN", "").startswith("stream")
    for text in said:
        assert text in everything_said()


@pytest.mark.sweep
@pytest.mark.slow
def test_blocks_are_one_graph_whatever_the_length_of_text_and_video(monkeypatch: pytest.MonkeyPatch) -> None:
    use_aot_eager(monkeypatch)
    torch._dynamo.reset()
    expected = plain_step("sizes", torch.float32)
    module, said = made("sizes", torch.float32), []
    with Undo() as undo:
        compile_blocks(module.pipe, undo, Row.of(said.append), strict=True)
        found = h3.step(module)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert said[-1].startswith("graphs compiled: 2, in ")  # one for the first size, one for any
    assert "1 of them again" in said[-1]


CHANGED = {
    "compiled": ({"COMPILE": "1"}, "graphs compiled: 1, in "),
    "streamed, compiled, attention kept": (
        {"COMPILE": "1", "PLAN": "stream:3", "KEEP": "attention"}, "graphs compiled: 1, in "
    ),
    "in eight bits": ({"COMPUTE": "int8"}, "Linears multiply in int8"),
    "split, of a base in eight bits": (
        {"COMPUTE": "int8", "BASE": "int8", "DEVICES": "cpu:0,cpu:1"}, "Linears multiply in int8"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.sweep] * (run != "in eight bits")) for run in CHANGED]
)
def test_run_whose_blocks_compute_otherwise_learns_nearly_the_same(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain()
    torch._dynamo.reset()
    variables, said = CHANGED[run]
    for name, value in {"STRICT": "1", **variables}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate()
    found, _ = train(tmp_path)
    assert said in everything_said()
    assert found != expected
    ours, theirs = (_tensors(files) for files in (found, expected))
    assert min(torch.cosine_similarity(ours[n], theirs[n], dim=0).item() for n in theirs) > 0.99


def _tensors(files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    return {
        f"{file} {name}": tensor.double().flatten()
        for file, content in files.items()
        if file.endswith(".safetensors")
        for name, tensor in safetensors.torch.load(content).items()
    }


@pytest.mark.parametrize(
    "over",
    [{}, *(pytest.param(over, marks=SWEEPS) for over in ({"PLAN": "stream:3"}, {"DEVICES": "cpu:0,cpu:1"}))],
    ids=str,
)
def test_run_that_was_ended_goes_on_where_it_was(
    over: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain()
    for name, value in {"RESUME": "auto", "SAVE_EVERY": "1", "STRICT": "1", **over}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate()
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, fault=4)
    ended.clear()  # as in a new process
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    found, module = train(tmp_path)
    assert 0 < len(module.seen) < 6
    assert {**found, "losses": b""} == {**expected, "losses": b""}


def call_of(module: h3.Training, dataset: Any = None, **script: Any) -> TrainingCall:
    return TrainingCall(
        accelerator=Accelerator(cpu=True), model=module, logger=None, dataset=dataset, options={},
        script=argparse.Namespace(**script),
    )  # fmt: skip


SIZES = [{}, {"num_frames": 39, "text": 9}, {"num_frames": 5, "height": 96}, {"num_frames": 124, "text": 70}]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sample_has_as_many_tokens_as_its_packed_sequence(size: dict[str, int]) -> None:
    pipe = h3.pipe_of(h3.lora_model())
    shared, positive, _ = h3.cached(1, pipe, **size)
    packed = positive["packed"]
    sizes = h3.SIZE | size
    pixels = {"pixels": sizes["height"] * sizes["width"], "num_frames": sizes["num_frames"]}
    video = FAMILY.video(pipe, {**shared, **positive})
    assert video is not None
    assert (video.tokens, video.length) == (packed["seq_len"], sizes["num_frames"])
    before = FAMILY.video(pipe, pixels)  # nothing is encoded yet: a prompt of 512 tokens is assumed
    assert before is not None
    text = packed["text_pos"].numel()
    assert before.length == video.length
    assert abs(before.tokens - (video.tokens + 512 - text)) <= 64
    longer = h3.cached(1, pipe, **{**size, "num_frames": sizes["num_frames"] + 17})[1]["packed"]["seq_len"]
    assert abs(replace(video, frames=video.frames + 1).tokens - longer) <= 64 + 2


def test_largest_sample_that_is_looked_at_decides_the_plan() -> None:
    module = made("sizes")
    facts = run_facts.read_facts(call_of(module, Samples(3), num_frames=5, height=64, width=96))
    packed = h3.cached(2, module.pipe, num_frames=39, text=9)[1]["packed"]
    assert facts.video is not None
    assert (facts.video.tokens, facts.samples, facts.checkpointing) == (packed["seq_len"], 3, True)


def test_peak_is_that_of_the_block_on_shapes_alone_and_attention_is_as_wide_as_its_heads() -> None:
    pipe = made().pipe
    one = micro_batch(pipe, 128, None)
    assert one.activation == 128 * 48 * 2
    assert one.attention == 128 * 4 * 16 * 2  # heads are wider than the hidden size together
    assert one.attention_sums == 128 * 4 * 4
    assert one.working > one.kept > one.attention
    assert micro_batch(pipe, 256, None).kept > 1.9 * one.kept


def test_as_few_blocks_are_streamed_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", "stream")
    job = read_job(call_of(made(), **VIDEO), None, settings.read())
    assert not job.unpredictable

    def taken_at(limit: int) -> int:
        return decide(job, Limits(available={"cpu": limit})).streamed_blocks

    taken: list[int] = []
    with pytest.raises(PlacementInvalid, match="besides them it needs"):
        taken.extend(taken_at(limit) for limit in range(2**22, 0, -(2**13)))
    assert taken[0] == 2
    assert taken == sorted(taken)
    assert taken[-1] == 4


def test_vdn_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", "stream")
    wanshim.activate()
    module = made()
    module.pipe.dit.vdn_enabled = True
    with pytest.raises(FeatureUnavailable, match="WANSHIM_PLAN=stream cannot train this model: VDN: its blocks attend"):
        runner.launch_training_task(Accelerator(cpu=True), Samples(1), module, Logger(tmp_path))
    assert "VDN" in str(compiled_blocks.refusal(call_of(module), settings.Settings(compile=True)))


@pytest.mark.parametrize("kind", [MiniMaxH3DiTComfy, MiniMaxH3DiTComfyPruned])
@pytest.mark.parametrize("way", ["split", "streamed"])
def test_layout_of_comfy_gives_the_same_loss_and_gradients(kind: type[Any], way: str) -> None:
    expected = h3.step(h3.Training(h3.pipe_of(h3.lora_model(kind=kind))))
    module = h3.Training(h3.pipe_of(h3.lora_model(kind=kind)))
    if way == "split":
        FAMILY.split(module.pipe, ("cpu:0", "cpu:1"))
    else:
        stream_model(module.pipe.dit, "cpu", count=3, blocks="blocks")
    assert all(map(torch.equal, expected, h3.step(module)))


@pytest.mark.parametrize("kind", ["control net", "guidance"])
def test_streamed_step_gives_the_same_loss_and_gradients(kind: str) -> None:
    module = made(kind)
    stream_model(module.pipe.dit, "cpu", count=3, blocks="blocks")
    assert all(map(torch.equal, plain_step(kind), h3.step(module)))


def test_pipeline_is_split_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = h3.write(tmp_path)
    h3.register(files)

    def load() -> Any:
        configs = [ModelConfig(path=str(files.models[0]))]
        return minimax_h3_audio_video.MiniMaxH3Pipeline.from_pretrained(
            torch_dtype=torch.bfloat16, device="cpu", model_configs=configs, processor_config=None
        )

    def losses(pipe: Any) -> torch.Tensor:
        pipe.scheduler.set_timesteps(1000, training=True)
        pipe.scheduler_audio.set_timesteps(1000, training=True)
        torch.manual_seed(1)
        with torch.no_grad():
            return h3.Training(pipe)({"number": 1})

    expected = losses(load())
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    pipe = load()
    assert split_of(pipe.dit).plan.devices == ("cpu", "cpu", "cpu")
    assert expected.isfinite()
    assert torch.equal(losses(pipe), expected)
    assert wanshim.report(strict=True).row(FEATURE).state == "exercised"


@pytest.fixture(scope="module")
def shared(forked_in_module: None) -> Iterator[SharedPipeline]:  # noqa: F811
    made = SharedPipeline(Request(gpus=2))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("changed", "way"),
    [
        ({}, (1, 2)),
        pytest.param({"num_frames": 39}, (1, 2), marks=SWEEPS),
        pytest.param({"cfg_scale": 2.0}, (2, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_generation_over_two_processes_is_that_of_one(
    changed: dict[str, Any], way: tuple[int, int], shared: SharedPipeline
) -> None:
    pipe = h3.generating_pipe()
    expected = h3.generate(pipe, **changed)
    before = shared.shared_forwards
    found = shared.run(partial(bind, pipe, **h3.arguments(**changed)), partial(h3.generate, pipe, **changed))
    assert shared.plan is not None
    assert (shared.plan.guidance, shared.plan.sequence) == way
    assert shared.shared_forwards - before == 3
    apart = [(ours - theirs).abs().max().item() for ours, theirs in zip(found, expected, strict=True)]
    assert max(apart) <= (0 if way == (2, 1) else 1e-5)
    assert all(map(torch.equal, expected, h3.generate(pipe, **changed)))  # nothing is left in the models


@pytest.mark.parametrize(
    ("gpus", "kind"),
    [
        (1, MiniMaxH3DiT),
        (1, MiniMaxH3DiTComfyPruned),  # whose parts have functions that its class binds, or makes
        pytest.param(2, MiniMaxH3DiT, marks=pytest.mark.slow),
        pytest.param(2, MiniMaxH3DiTComfy, marks=SWEEPS),
        pytest.param(2, MiniMaxH3DiTComfyPruned, marks=pytest.mark.slow),
    ],
)
def test_generation_under_vram_management_is_streamed(
    gpus: int, kind: type[MiniMaxH3DiT], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = h3.generate(h3.generating_pipe(kind))
    pipe = vram_management.manage(h3.generating_pipe(kind), "host", tmp_path)
    handle = wanshim.parallelize_pipeline(pipe, gpus=gpus)
    request.addfinalizer(handle.remove)
    for ours, theirs in zip(h3.generate(pipe), expected, strict=True):
        assert (ours - theirs).abs().max() <= (0 if gpus == 1 else 1e-5)
    assert handle.plan.replaces_offload
    assert handle.plan.sequence == gpus


def test_few_tokens_of_generation_are_a_packed_sequence() -> None:
    """By which a worker's copy is compared: text, audio and video, each where it was."""
    pipe, seen = h3.generating_pipe(), []

    def model_fn(**kwargs: Any) -> Any:
        _, few = FAMILY.denoising.few((), kwargs)
        seen.append((few["packed"], minimax_h3_audio_video.model_fn_minimax_h3(**few)))
        return minimax_h3_audio_video.model_fn_minimax_h3(**kwargs)

    pipe.model_fn = model_fn
    h3.generate(pipe, num_inference_steps=1)
    ((packed, (video, audio)),) = seen
    assert packed["token_tags"].tolist() == [1, 2, 2, 0]
    assert (packed["seq_len"], video.shape, audio.shape) == (4, (1, 24, 1, 2, 2), (2, 32, 1))
    assert bool(video.isfinite().all() and audio.isfinite().all())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("control net", "controlnet works between the blocks on all tokens"),
        ("vdn", "VDN: its blocks attend by kernels"),
    ],
)
def test_generation_of_what_needs_all_tokens_stays_on_one_gpu_by_name(
    kind: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"controlnet": h3.control_net(torch.float32)} if kind == "control net" else {}
    pipe = h3.generating_pipe(**parts)
    expected = h3.generate(pipe)
    monkeypatch.setattr(pipe.dit, "vdn_enabled", kind == "vdn", raising=False)
    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate("none,diffsynth.generate")
    if kind == "control net":
        assert all(map(torch.equal, expected, h3.generate(pipe)))
        assert reason in str(wanshim.report(strict=False).row("diffsynth.generate").fallbacks)
        wanshim.deactivate()
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.activate("none,diffsynth.generate")
    if kind == "vdn":
        with pytest.raises(FeatureUnavailable, match=f"MiniMaxH3Pipeline would run on one GPU: {reason}"):
            h3.generate(pipe)


GENERATES = """
    import sys, torch
    from tests.contract.diffsynth import minimax_h3

    torch.set_num_threads(1)
    torch.save(minimax_h3.generate(minimax_h3.generating_pipe()), sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.sweep
def test_generation_of_an_unmodified_script_is_that_of_one_process_by_one_command(tmp_path: Path) -> None:
    script = tmp_path / "generate.py"
    script.write_text(dedent(GENERATES))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    done = subprocess.run(
        [sys.executable, "-m", "wanshim", "generate", "--gpus", "2", "--", str(script), str(tmp_path / "latents")],
        cwd=Path(__file__).parents[3], env={**clean, "ACCELERATE_USE_CPU": "true"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "diffsynth.generate: MiniMaxH3Pipeline on cpu, cpu: tokens over 2" in done.stderr
    found = torch.load(tmp_path / "latents", weights_only=True)
    for ours, theirs in zip(found, h3.generate(h3.generating_pipe()), strict=True):
        assert (ours - theirs).abs().max() <= 1e-5


def test_more_ranks_than_heads_are_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", "sequence")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    wanshim.activate(f"none,{FEATURE}")
    config = {"model_class": "diffsynth.models.minimax_h3_dit.MiniMaxH3DiT", "extra_kwargs": h3.TINY}
    pool = model_loader.ModelPool()
    with pytest.raises(FeatureUnavailable, match="6 ranks for 4 attention heads, of which each computes whole ones"):
        pool.load_model_file(config, "no such file", pool.default_vram_config())
    with pytest.raises(FeatureUnavailable, match="6 ranks for 4 attention heads"):
        runner.launch_training_task(Accelerator(cpu=True), Samples(1), made(), None)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("control net", "controlnet works between the blocks on all tokens"),
        ("vdn", "VDN: its blocks attend by kernels"),
    ],
)
def test_what_needs_all_tokens_is_not_sharded_by_name(kind: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", "sequence")
    wanshim.activate(f"none,{FEATURE}")
    module = made("control net" if kind == "control net" else "plain")
    if kind == "vdn":
        module.pipe.dit.vdn_enabled = True
    with pytest.raises(FeatureUnavailable, match=reason):
        runner.launch_training_task(Accelerator(cpu=True), Samples(1), module, None)
    assert sequence_of(module.pipe.dit) is None


ARGUMENTS = "--height 32 --width 64 --num_frames 22 --dataset_num_workers 0 --learning_rate 1e-3 --samples 4"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    h3.write(folder)
    return folder


def script(
    folder: Path, checkpoint: Path, output: str, *launcher: str, data: str = "", more: str = "", **own: str
) -> str:
    """Run the user's script under this launcher; what it said."""
    command = [sys.executable, "-m", "tests.contract.diffsynth.minimax_h3_train", *ARGUMENTS.split()]
    if launcher[:1] == ("torchrun",):
        command = [sys.executable, "-m", "torch.distributed.run", *launcher[1:], *command[1:]]
    elif launcher:
        command = [sys.executable, "-m", "wanshim", "run", *launcher, "--", *command]
    command += ["--checkpoint", str(checkpoint), "--output_path", str(folder / output), "--dataset_base_path", data]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    clean |= {"GLOO_SOCKET_IFNAME": "lo", **{f"WANSHIM_{name}": value for name, value in own.items()}}
    done = subprocess.run(
        [*command, "--use_gradient_checkpointing", *more.split()],
        cwd=Path(__file__).parents[3], env=clean, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def written(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in (*folder.glob("*.safetensors"), *folder.glob("losses*"))}
    assert len(found) > 1
    assert b"NaN" not in b"".join(found.values())
    return found


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_user_s_script_streams_on_two_processes_with_the_files_of_two_without(tmp_path: Path, checkpoint: Path) -> None:
    """One copy of the waiting weights, for both processes of the host."""
    script(tmp_path, checkpoint, "plain", "torchrun", "--nproc-per-node", "2")
    said = script(tmp_path, checkpoint, "streamed", "--gpus", "2", PLAN="stream:3", STRICT="1")
    assert "streaming 3 of 4 blocks to cpu" in said
    assert "the 2 ranks of this host have the weights of MiniMaxH3DiT from one copy in host memory" in said
    assert written(tmp_path / "streamed") == written(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_user_s_script_trains_streamed_on_what_it_has_cached(tmp_path: Path, checkpoint: Path) -> None:
    script(tmp_path, checkpoint, "cache", more="--task sft:data_process")
    cached = {"data": str(tmp_path / "cache"), "more": "--task sft:train"}
    script(tmp_path, checkpoint, "plain", **cached)
    said = script(tmp_path, checkpoint, "streamed", "--gpus", "1", PLAN="stream", STRICT="1", **cached)
    assert "streaming 2 of 4 blocks to cpu" in said
    assert written(tmp_path / "streamed") == written(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.sweep  # test_sequence_minimax_h3.py has the steps
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("processes", "variables"),
    [(2, {}), (2, {"COMPILE": "1"}), (3, {"KEEP": "off"})],
    ids=str,
)
def test_user_s_script_trains_each_sample_on_all_processes(
    tmp_path: Path, checkpoint: Path, processes: int, variables: dict[str, str]
) -> None:
    """The losses, and what is trained, of one process: every sample of another length, two of them a step."""
    more = "--gradient_accumulation_steps 2"
    script(tmp_path, checkpoint, "plain", more=more)
    said = script(
        tmp_path, checkpoint, "shared", "--gpus", str(processes), more=more, PLAN="sequence", STRICT="1", **variables
    )
    assert f"sequence parallel over {processes} ranks, 4 blocks, 4 heads" in said
    assert "predicted peak for 640 tokens" in said  # of text, too
    assert ("graphs compiled: " in said) is ("COMPILE" in variables)
    losses = [json.loads((tmp_path / "plain/losses.0.json").read_text())]
    losses += [json.loads((tmp_path / f"shared/losses.{rank}.json").read_text()) for rank in range(processes)]
    torch.testing.assert_close(torch.tensor(losses[1:]), torch.tensor(losses[:1] * processes), rtol=1e-5, atol=0)
    ours, theirs = (_tensors(written(tmp_path / name)) for name in ("shared", "plain"))
    assert max(((ours[n] - theirs[n]).norm() / theirs[n].norm()).item() for n in theirs) < 1e-4


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_user_s_script_encodes_its_videos_and_sounds_once(tmp_path: Path, checkpoint: Path) -> None:
    script(tmp_path, checkpoint, "plain", more="--num_epochs 2")
    said = script(
        tmp_path,
        checkpoint,
        "kept",
        "--gpus",
        "1",
        more="--num_epochs 2",
        ENCODE_CACHE=f"{tmp_path}/encoded",
        STRICT="1",
    )
    assert f"8 results were computed and 16 read in {tmp_path}/encoded" in said
    assert written(tmp_path / "kept") == written(tmp_path / "plain")
