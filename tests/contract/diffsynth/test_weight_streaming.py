"""`WANSHIM_PLAN=stream` under `launch_training_task`: the gradients and files of a model wholly on its device."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import runner
from safetensors.torch import load_file

import wanshim
from tests.contract.diffsynth import clip_job, variants, video_job
from tests.contract.diffsynth.ddp_jobs import forked, lora_of
from tests.contract.diffsynth.ddp_worker import Job
from tests.contract.diffsynth.training import FEATURE, Logger, Samples, Training
from wanshim import settings
from wanshim.adapters.diffsynth import checkpoint_offload
from wanshim.adapters.diffsynth.splitting import flux2, refusals
from wanshim.adapters.diffsynth.splitting.job import read_job
from wanshim.adapters.diffsynth.training_road import TrainingCall
from wanshim.core.model_split import split_of
from wanshim.core.strategy import Limits, decide, predict
from wanshim.core.streaming import stream_model, stream_of
from wanshim.demo import wan_checkpoint
from wanshim.errors import FeatureUnavailable, PlacementInvalid


class Distilling(Training):
    """Has several forwards in each step, as `--task direct_distill` and losses over pairs of samples have."""

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        return super().forward(data, inputs) + 2 * super().forward(data, inputs)


def train(
    folder: Path, accumulation: int = 1, blocks: int = 4, training: type[Training] = Training
) -> tuple[dict[str, bytes], Training]:
    torch.manual_seed(11)
    module = training()
    del module.pipe.dit.blocks[blocks:]
    runner.launch_training_task(
        Accelerator(gradient_accumulation_steps=accumulation), Samples(4), module, Logger(folder),
        learning_rate=1e-2, num_workers=0, save_steps=2,
    )  # fmt: skip
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}, module


def notes() -> str:
    return "\n".join(wanshim.report(strict=False).row(FEATURE).notes)


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", "stream")


def test_two_processes_stream_with_the_gradients_and_file_of_plain_ddp(tmp_path: Path) -> None:
    """Two processes share one copy of the waiting weights; accumulation 1, an odd sample is seen twice."""
    plain = Job("plain", samples=3, accumulation=1)
    streamed = Job("streamed", samples=3, accumulation=1, variables={"WANSHIM_PLAN": "stream:3"})
    said = forked(tmp_path / "ranks", [plain, streamed])
    assert lora_of(tmp_path / "ranks", streamed) == lora_of(tmp_path / "ranks", plain)
    for rank, ours in enumerate(said):
        found, expected = (tmp_path / "ranks" / f"{job.name}.gradients{rank}" for job in (streamed, plain))
        assert found.read_bytes() == expected.read_bytes()
        assert ours["streamed"]["seen"] == ours["plain"]["seen"]
        assert any("streaming 3 of 4 blocks to cpu" in note for note in ours["streamed"]["notes"])
    assert said[0]["plain"]["seen"] != said[1]["plain"]["seen"]


@pytest.mark.slow
def test_checkpoint_that_a_script_saves_by_accelerate_has_every_weight(tmp_path: Path, streaming: None) -> None:
    class Saving(Logger):
        def on_step_end(self, accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            super().on_step_end(accelerator, model, *args, **kwargs)
            accelerator.save_state(self.output_path)

    wanshim.activate()
    module = Training()
    runner.launch_training_task(Accelerator(), Samples(1), module, Saving(tmp_path), num_workers=0)
    assert "streaming 2 of 4 blocks" in notes()
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == module.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulation", "offload", "training"), [(1, "off", Training), (2, "on", Training), (1, "off", Distilling)]
)
def test_streamed_training_writes_the_files_of_resident_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int, offload: str, training: type[Training]
) -> None:
    wanshim.activate()  # its repairs alone: with them a step of early DiffSynth has another result
    expected, _ = train(tmp_path / "resident", accumulation, training=training)
    monkeypatch.setattr(checkpoint_offload, "MIN_BYTES", 1)
    monkeypatch.setenv("WANSHIM_PLAN", "stream:3")  # switches the feature on
    monkeypatch.setenv("WANSHIM_OFFLOAD", offload)
    wanshim.activate()
    found, module = train(tmp_path / "streamed", accumulation, training=training)
    assert found == expected
    handle = stream_of(module.pipe.dit)
    assert handle is not None
    assert handle.ring.count.loads > 2 * 4  # again in every step
    assert "streaming 3 of 4 blocks to cpu" in notes()
    offloaded = wanshim.report(strict=False).row("diffsynth.checkpoint_offload").notes
    assert ("28 checkpoint inputs" in "\n".join(offloaded)) is (offload == "on")


@pytest.mark.slow
def test_each_training_of_a_script_streams_what_its_own_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(module: Training, name: str) -> dict[str, bytes]:
        torch.manual_seed(11)
        logger = Logger(tmp_path / name)
        runner.launch_training_task(Accelerator(), Samples(2), module, logger, learning_rate=1e-2, num_workers=0)
        return {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")}

    wanshim.activate()
    torch.manual_seed(11)
    resident, streamed = Training(), Training()
    streamed.load_state_dict(resident.state_dict())
    for number, (plan, count) in enumerate([("stream:2", 2), ("stream:2", 2), ("stream:3", 3), ("auto", 0)]):
        monkeypatch.delenv("WANSHIM_PLAN", raising=False)
        wanshim.activate()
        expected = run(resident, f"resident{number}")
        monkeypatch.setenv("WANSHIM_PLAN", plan)
        wanshim.activate()
        assert run(streamed, f"streamed{number}") == expected
        handle = stream_of(streamed.pipe.dit)
        assert (len(handle.plan.streamed) if handle is not None else 0) == count


@pytest.mark.slow
def test_model_of_two_blocks_is_streamed_and_one_of_fewer_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate()
    expected, _ = train(tmp_path / "resident", blocks=2)
    monkeypatch.setenv("WANSHIM_PLAN", "stream")
    wanshim.activate()
    found, _ = train(tmp_path / "streamed", blocks=2)
    assert found == expected
    assert "streaming 2 of 2 blocks" in notes()
    with pytest.raises(PlacementInvalid, match=r"^a model of 1 block cannot be streamed\. Expected at least 2 blocks"):
        train(tmp_path / "one", blocks=1)


@pytest.mark.slow
def test_pipeline_loaded_by_diffsynth_waits_on_the_host_and_streams_when_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = wan_checkpoint.write(tmp_path / "checkpoint")
    wan_checkpoint.register(files)
    torch.manual_seed(2)
    expected = clip_job.train(clip_job.make_module(files), tmp_path / "resident")
    monkeypatch.setenv("WANSHIM_PLAN", "stream")
    wanshim.activate(f"none,{FEATURE}")
    torch.manual_seed(2)
    module = clip_job.make_module(files)
    assert split_of(module.pipe.dit) is None
    found = clip_job.train(module, tmp_path / "streamed")
    assert stream_of(module.pipe.dit) is not None
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "waits on the host until a task begins" in notes()


def test_as_few_blocks_are_streamed_as_fit_and_checkpoints_leave_when_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_CHUNK", "off")
    monkeypatch.setattr(predict, "OFFLOADED_WINDOW", 1)
    monkeypatch.setenv("WANSHIM_PLAN", "stream")
    script = argparse.Namespace(**video_job.VIDEO)
    job = read_job(call_of(video_job.module_with_video(), script), None, settings.read())

    def taken_at(limit: int) -> tuple[bool, int]:
        plan = decide(job, Limits(available={"cpu": limit}))
        assert plan.step is not None
        return plan.step.offload, plan.streamed_blocks

    taken: list[tuple[bool, int]] = []
    with pytest.raises(PlacementInvalid, match="besides them it needs"):
        taken.extend(taken_at(limit) for limit in range(2**21, 0, -(2**12)))
    assert taken[0] == (False, 2)
    assert taken == sorted(taken)
    assert {(False, count) for count in range(2, 5)} <= set(taken)
    assert taken[-1] == (True, 4)


@pytest.mark.usefixtures("streaming")
def test_step_that_fits_in_no_way_is_refused_with_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanshim.activate(f"none,{FEATURE}")
    video_job.limit(monkeypatch, 1000)
    with pytest.raises(PlacementInvalid, match="does not fit cpu with its frozen weights streamed: besides them"):
        video_job.train(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def accelerator(**plugins: Any) -> Any:
    """Stands for an Accelerator with DeepSpeed, which does not come up without GPUs."""
    state = SimpleNamespace(**plugins)
    return SimpleNamespace(state=state, num_processes=1, device="cpu", gradient_accumulation_steps=1)


def call_of(module: Training, script: object) -> TrainingCall:
    return TrainingCall(accelerator=accelerator(), model=module, logger=None, dataset=None, options={}, script=script)


ARGS: dict[str, argparse.Namespace] = {
    "manager": argparse.Namespace(enable_model_cpu_offload=True),
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("vap", "vap computes a block's work from its children"),
        ("base", "WANSHIM_BASE: a quantised weight"),
        ("managed", "--fp8_models and --offload_models move the weights themselves"),
        ("checkpointing", "pass --use_gradient_checkpointing"),
        ("manager", "--enable_model_cpu_offload"),
        ("deepspeed", "DeepSpeed places the parameters"),
        ("longcat", "LongCat-Video keeps caches"),
    ],
)
@pytest.mark.usefixtures("streaming")
def test_what_cannot_be_streamed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, reason: str
) -> None:
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    module = Training()
    if change == "vap":
        module.pipe.vap = variants.tiny("vap", "cpu").beside["vap"]
    if change == "base":
        monkeypatch.setenv("WANSHIM_BASE", "float8")
    if change == "managed":
        module.pipe.dit.vram_management_enabled = True
    if change == "checkpointing":
        module.use_gradient_checkpointing = False
    if change == "longcat":
        module.pipe.dit = type("LongCatVideoTransformer3DModel", (torch.nn.Module,), {})()
    with_plugin = accelerator(deepspeed_plugin=object()) if change == "deepspeed" else accelerator()
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(FeatureUnavailable, match=f"WANSHIM_PLAN=stream cannot train this model: .*{reason}"):
        runner.launch_training_task(with_plugin, Samples(), module, Logger(tmp_path), args=ARGS.get(change))
    assert stream_of(module.pipe.dit) is None


def test_flux2_is_refused_for_its_two_lists_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "family_of", lambda dit: flux2.FAMILY)
    monkeypatch.setattr(refusals, "refusal", lambda pipe: None)
    assert "one list is streamed" in str(refusals.stream_refusal(call_of(Training(), None), settings.read()))


def test_model_that_is_split_already_is_not_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wanshim.adapters.diffsynth.splitting.wan import FAMILY

    monkeypatch.setenv("WANSHIM_PLAN", "stream")
    wanshim.activate(f"none,{FEATURE}")
    module = Training()
    FAMILY.split(module.pipe, ("cpu", "cpu"))
    with pytest.raises(FeatureUnavailable, match="is split over cpu, cpu and the plan is stream"):
        runner.launch_training_task(Accelerator(), Samples(), module, Logger(tmp_path))


def loss_and_gradients(made: variants.Variant, *, streamed: bool) -> list[torch.Tensor]:
    """Of one checkpointed step whose blocks' feed-forward networks are frozen."""
    for block in made.dit.blocks:
        block.ffn.requires_grad_(False)
    if streamed:
        stream_model(made.dit, "cpu", count=4, blocks="blocks")
    torch.manual_seed(7)  # WanToDance's music encoder drops out at random
    loss = made(use_gradient_checkpointing=True).float().pow(2).mean()
    loss.backward()
    gradients = [p.grad for model in made.modules().values() for p in model.parameters()]
    assert any(gradient is not None for gradient in gradients)
    return [loss.detach(), *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.sweep] * (name not in ("i2v", "vace", "s2v")))
        for name in variants.MAKERS
        if name != "vap"
    ],
)
def test_variant_gives_the_same_loss_and_gradients_streamed(name: str) -> None:
    """All but VAP, which is refused; S2V with the repair of its checkpointing."""
    wanshim.activate("none,diffsynth.s2v_checkpointing")
    expected = loss_and_gradients(variants.tiny(name, "cpu"), streamed=False)
    assert all(map(torch.equal, expected, loss_and_gradients(variants.tiny(name, "cpu"), streamed=True)))
