"""DiffSynth's `launch_training_task` with pipelined micro-batches: the same files, the same logs, nothing left."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import DiffusionTrainingModule, FlowMatchSFTLoss, ModelLogger
from diffsynth.diffusion.flow_match import FlowMatchScheduler
from diffsynth.pipelines.wan_video import model_fn_wan_video
from wanshim.adapters.diffsynth import training_loop

import wanshim
from tests.contract.diffsynth import wan
from wanshim.core.placement import split_of

FEATURE = "diffsynth.model_split"


class Pipe(torch.nn.Module):
    """What the loss asks of a pipeline, around a tiny DiT; the text encoder and VAE have done their work."""

    in_iteration_models = ("dit",)
    model_fn = staticmethod(model_fn_wan_video)

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.dit = wan.lora_model(dtype=torch.bfloat16)
        self.scheduler = FlowMatchScheduler("Wan")
        self.scheduler.set_timesteps(1000, training=True)
        self.device, self.torch_dtype = torch.device(device), torch.bfloat16


class Training(DiffusionTrainingModule):
    """Args: own_draws: noise and timestep follow from the sample's number, whichever process draws them."""

    def __init__(self, fault: int | None = None, device: str = "cpu", own_draws: bool = False) -> None:
        super().__init__()
        self.pipe = Pipe(device)
        self.seen: list[int] = []
        self.fault = fault
        self.own_draws = own_draws

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        number = (inputs or data)["number"]
        faulty = len(self.seen) == self.fault
        self.seen.append(number)
        sample = {name: t.to(self.pipe.device) for name, t in wan.inputs("t2v", number, dtype=torch.bfloat16).items()}
        if self.own_draws:
            torch.manual_seed(number)
        loss = FlowMatchSFTLoss(
            self.pipe, input_latents=sample["latents"], context=sample["context"], use_gradient_checkpointing=True
        )
        if faulty:
            raise torch.OutOfMemoryError("no room for this one")
        return loss

    def trainable_modules(self) -> Any:
        return [p for p in self.parameters() if p.requires_grad]

    def export_trainable_state_dict(self, state_dict: dict[str, Any], remove_prefix: str | None = None) -> Any:
        return {name: tensor for name, tensor in state_dict.items() if "lora" in name}


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    load_from_cache = False

    def __init__(self, count: int = 7) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "noise": torch.rand(())}  # a draw of the caller's between forwards


class Logger(ModelLogger):
    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.lines: list[tuple[int, float | None]] = []

    def on_step_end(self, accelerator: Any, model: Any, save_steps: Any = None, **kwargs: Any) -> None:
        super().on_step_end(accelerator, model, save_steps, **{k: v for k, v in kwargs.items() if k != "loss"})
        self.lines.append((self.num_steps, kwargs["loss"].item() if "loss" in kwargs else None))


def train(folder: Path, accumulation: int, fault: int | None = None) -> tuple[dict[str, bytes], Any, Training]:
    from diffsynth.diffusion import runner

    torch.manual_seed(11)
    module, logger = Training(fault), Logger(folder)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    runner.launch_training_task(
        accelerator, Samples(), module, logger, learning_rate=1e-2, num_workers=0, save_steps=2, num_epochs=2
    )
    assert not {"prepare", "backward", "save"} & vars(accelerator).keys()
    assert "on_step_end" not in vars(logger)
    assert "forward" not in vars(module)
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}
    return files, (logger.lines, module.seen, torch.rand(())), module


@pytest.fixture(autouse=True)
def _modern_scheduler() -> None:
    if not inspect.signature(FlowMatchScheduler).parameters:
        pytest.skip("this DiffSynth's scheduler is made another way")


@pytest.mark.parametrize(("stages", "accumulation"), [(2, 4), (3, 3)])
def test_pipelined_training_writes_the_files_and_logs_of_unsplit_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int, accumulation: int
) -> None:
    """Checkpoints every second micro-batch, some of them in the middle of an accumulation; last group partial."""
    expected, logs, _ = train(tmp_path / "unsplit", accumulation)
    monkeypatch.setenv("WANSHIM_DEVICES", ",".join(["cpu"] * stages))
    wanshim.activate(FEATURE)
    found, split_logs, module = train(tmp_path / "split", accumulation)
    assert len(expected) == 7
    assert found == expected
    assert split_logs == logs
    notes = wanshim.report(strict=False).row(FEATURE).notes
    assert any(f"{accumulation} micro-batches in {stages} lanes" in note for note in notes)
    hooks = [h for m in module.pipe.dit.modules() for h in (*m._forward_pre_hooks, *m._forward_hooks)]
    split_of(module.pipe.dit).remove()
    assert len(hooks) == len(module.pipe.dit.blocks) + 1 + stages  # the split's own alone


@pytest.mark.parametrize(
    ("accumulation", "variables", "reason"),
    [(1, {}, "gradient accumulation is 1"), (2, {"WANSHIM_LANES": "0"}, "WANSHIM_LANES is off")],
)
def test_plan_says_plainly_when_a_split_is_room_and_not_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int, variables: dict[str, str], reason: str
) -> None:
    expected, logs, _ = train(tmp_path / "unsplit", accumulation)
    for name, value in {"WANSHIM_DEVICES": "cpu,cpu", **variables}.items():
        monkeypatch.setenv(name, value)
    wanshim.activate(FEATURE)
    found, split_logs, _ = train(tmp_path / "split", accumulation)
    assert (found, split_logs) == (expected, logs)
    notes = wanshim.report().row(FEATURE).notes
    assert any(reason in note and "room, not speed" in note for note in notes)


@pytest.mark.parametrize("fault", [0, 5])
def test_out_of_memory_in_a_lane_ends_the_run_with_that_error_and_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    complete, _, _ = train(tmp_path / "complete", 4)
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(FEATURE)
    with pytest.raises(torch.OutOfMemoryError, match="no room for this one"):
        train(tmp_path / "split", 4, fault)
    left = {path.name: path.read_bytes() for path in (tmp_path / "split").glob("*")}
    assert left.items() <= complete.items()


def test_file_that_could_not_be_written_whole_is_not_there_and_the_old_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "lora.safetensors"
    target.write_bytes(b"old")

    def half(obj: Any, f: str, **kwargs: Any) -> None:
        Path(f).write_bytes(b"ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        training_loop.save_whole(half)({}, str(target))
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["lora.safetensors"]
