"""`diffsynth.progress` on `launch_dmd2_training_task`, which has a loop and a bar of its own (2.0.18 and later)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import ModelLogger

import wanshim
from wanshim.core.training.progress_log import run_folder
from wanshim.errors import FeatureUnavailable

dmd2 = pytest.importorskip("diffsynth.diffusion.dmd2", reason="this DiffSynth has no DMD2 yet")


class Distillation(torch.nn.Module):
    """What DiffSynth's loop asks of its module, over two layers: three real DiTs are three checkpoints."""

    dmd2_student_model_name, dmd2_fake_score_model_name, dmd2_discriminator_model_name = "dit", "fake", None

    def __init__(self) -> None:
        super().__init__()
        self.pipe = torch.nn.Module()
        self.pipe.dit, self.pipe.fake = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        self.dmd2_config = SimpleNamespace(
            fake_score_learning_rate=5e-3,
            discriminator_learning_rate=None,
            student_update_freq=2,
            student_grad_clip_norm=None,
        )
        self.losses: list[float] = []

    def forward(self, data: Any, iteration: int) -> dict[str, torch.Tensor]:
        loss = (self.pipe.dit(data) + self.pipe.fake(data)).pow(2).mean()
        self.losses.append(loss.item())
        return {"student_loss": loss * 0, "total_loss": loss}

    def export_trainable_state_dict(self, state_dict: dict[str, Any], remove_prefix: str | None) -> dict[str, Any]:
        return state_dict


class Samples(torch.utils.data.Dataset):
    load_from_cache = False

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2) * index


def distill(folder: Path) -> Distillation:
    module = Distillation()
    dmd2.launch_dmd2_training_task(
        Accelerator(cpu=True), Samples(), module, ModelLogger(str(folder)), learning_rate=2e-3, num_workers=0
    )
    return module


@pytest.mark.parametrize(("plan", "strict"), [("sequence", "0"), ("stream", "1"), ("auto", "1"), ("pipeline", "1")])
def test_plan_that_was_named_ends_dmd2_before_it_begins(
    plan: str, strict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PLAN": plan, "STRICT": strict}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate("none,diffsynth.model_split")
    monkeypatch.setattr(Distillation, "to", lambda *_, **__: pytest.fail("the model was moved"))
    with pytest.raises(FeatureUnavailable, match=f"WANSHIM_PLAN={plan} has no effect on .*launch_dmd2_training_task"):
        distill(tmp_path)


def test_resume_is_refused_by_name_before_the_model_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_RESUME", "auto")
    wanshim.activate("none,diffsynth.resume")
    monkeypatch.setattr(Distillation, "to", lambda *_, **__: pytest.fail("the model was moved"))
    with pytest.raises(FeatureUnavailable, match="WANSHIM_RESUME is unavailable here: DMD2 has several optimizers"):
        distill(tmp_path)
    assert not (tmp_path / "training_state").exists()


@pytest.mark.parametrize("plan", ["stream", "auto", "pipeline"])
def test_dmd2_under_a_plan_that_it_cannot_have_says_so_once(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", plan)
    wanshim.activate("none,diffsynth.model_split")
    assert len(distill(tmp_path).losses) == 5
    row = wanshim.report().row("diffsynth.model_split")
    (reason,) = row.fallbacks
    assert (row.state, row.calls, "launch_dmd2_training_task trains several models" in reason) == (
        "ineffective",
        1,
        True,
    )


def test_run_is_recorded_with_the_total_loss_and_the_rate_of_the_student(tmp_path: Path) -> None:
    bar = dmd2.tqdm
    wanshim.activate("none,diffsynth.progress")
    module = Distillation()
    logger = ModelLogger(str(tmp_path / "out"))
    dmd2.launch_dmd2_training_task(
        Accelerator(cpu=True), Samples(), module, logger, learning_rate=2e-3, num_workers=0, num_epochs=2
    )
    assert dmd2.tqdm is bar
    folder = run_folder(tmp_path / "out" / "training_logs", tmp_path / "out")
    (path,) = folder.glob("*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record for record in records if "event" not in record]
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert [step["loss"] for step in steps] == pytest.approx(module.losses)
    assert {step["lr"] for step in steps} == {2e-3}
    assert [record["step"] for record in records if record.get("event") == "checkpoint saved"] == [5, 10]
    assert records[-1]["state"] == "finished"
    assert json.loads((folder / "run.json").read_text())["accounting"]["micro_steps"] == 10
