"""`fastvideo.progress` on FastVideo's own trainer loops: what the log says against what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.fastvideo.conftest import Ranks, needs_training
from tests.contract.fastvideo.training_jobs import STEP_S
from tests.unit.monitor.logs import folder_of
from wanshim.core.training.eta import StepEta
from wanshim.core.training.progress_log import run_folder
from wanshim.monitor import status
from wanshim.monitor.health import Patience

pytestmark = needs_training
FEATURE = "fastvideo.progress"
TASKS = ["train", "pipeline"]


def records(logs: Path, output: Path, rank: int = 0) -> list[dict[str, Any]]:
    (path,) = run_folder(logs, output).glob(f"rank-{rank:05d}.*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in found if "event" not in record]


def options(tmp_path: Path, **job: Any) -> dict[str, Any]:
    environment = {"WANSHIM_PROGRESS_DIR": str(tmp_path / "logs"), "WANSHIM_STRICT": "1"}
    return {"features": FEATURE, "output": str(tmp_path / "out"), "environment": environment, **job}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 1), (2, 2)], ids=["one rank", "two ranks", "one group of two"])
def test_run_ends_at_100_percent_with_the_totals_that_happened(
    installed: Ranks, tmp_path: Path, task: str, world: int, sp: int
) -> None:
    ranks = installed(task, world=world, **options(tmp_path, sp=sp, steps=7, accumulation=3))
    found = status.of_folder(folder_of(tmp_path / "logs"), Patience())[0]
    assert (found["state"], found["progress_percent"], found["problems"]) == ("finished", 100, [])
    assert found["current_step"] == found["total_steps"] == found["optimizer_step"] == 7
    assert [gpu["rank"] for gpu in found["gpus"]] == list(range(world))
    run = json.loads((run_folder(tmp_path / "logs", tmp_path / "out") / "run.json").read_text())
    steps = run["accounting"]
    assert steps["samples_per_step"] == 3 * world // sp  # the ranks of a group share their samples
    assert (steps["processes"], steps["sequence_parallel"]) == (world, sp)
    for rank in ranks:
        assert rank["micro"] == steps["micro_steps"] == 21
        assert rank["restored"]
        logged = steps_of(records(tmp_path / "logs", tmp_path / "out", rank["rank"]))
        assert [record["loss"] for record in logged] == pytest.approx(rank["losses"])
        assert [record["lr"] for record in logged] == pytest.approx([0.1 * 0.5**step for step in range(7)])


@pytest.mark.parametrize("task", TASKS)
def test_checkpoints_and_validations_are_no_step_and_the_eta_holds(installed: Ranks, tmp_path: Path, task: str) -> None:
    slow = {"save_steps": 4, "save_seconds": 0.6, "validate_every": 3, "validate_seconds": 0.4}
    installed(task, world=1, **options(tmp_path, steps=12, accumulation=2, **slow))
    found = records(tmp_path / "logs", tmp_path / "out")
    events = [
        (record["event"], record["step"]) for record in found if record.get("event") in ("checkpoint", "validation")
    ]
    assert [step for event, step in events if event == "checkpoint"] == [4, 8, 12, 12]
    assert [step for event, step in events if event == "validation"] == [3, 6, 9, 12]
    logged = steps_of(found)
    assert max(record["seconds"] for record in logged[1:]) < 2 * STEP_S + 0.3
    run = json.loads((run_folder(tmp_path / "logs", tmp_path / "out") / "run.json").read_text())
    assert (run["checkpoints"], run["validations"]) == (4, 4)
    pace = StepEta(12, 1, run["checkpoints"], run["validations"])
    for record in logged[:6]:
        pace.add(record["seconds"], record.get("checkpoint_seconds", 0.0), record.get("validation_seconds", 0.0))
    # The validation after step 6 is part of step 7's line; what is left after that line is 6 steps, one
    # validation more than the pace has seen.
    assert pace.eta_seconds == pytest.approx(found[-1]["t"] - logged[5]["t"], rel=0.1)


def test_validations_of_the_method_itself_are_those_it_makes(installed: Ranks, tmp_path: Path) -> None:
    (rank,) = installed("train", world=1, **options(tmp_path, steps=6, method_validates_every=3, validate_seconds=0.4))
    if not rank["asks_method"]:
        pytest.skip("this FastVideo does not ask its methods to validate")
    found = records(tmp_path / "logs", tmp_path / "out")
    assert [record["step"] for record in found if record.get("event") == "validation"] == [3, 6]
    assert json.loads((run_folder(tmp_path / "logs", tmp_path / "out") / "run.json").read_text())["validations"] == 2


def test_resumed_run_goes_on_at_its_step(installed: Ranks, tmp_path: Path) -> None:
    installed("train", world=1, **options(tmp_path, steps=4, save_steps=4))
    installed("train", world=1, **options(tmp_path, steps=10, save_steps=4, resume="latest"))
    found = records(tmp_path / "logs", tmp_path / "out")
    assert [record["step"] for record in steps_of(found)] == list(range(1, 11))
    assert [record["done"] for record in found if record.get("event") == "start"] == [0, 4]
    run = status.of_folder(folder_of(tmp_path / "logs"), Patience())[0]
    assert (run["attempt"], run["current_step"], run["progress_percent"]) == (2, 10, 100)
    curve = status.history(folder_of(tmp_path / "logs").runs[run["id"]])["curve"]
    assert curve["x"] == list(range(1, 11))


@pytest.mark.parametrize("task", TASKS)
def test_training_that_fails_is_logged_as_failed_and_raises_what_it_raised(
    installed: Ranks, tmp_path: Path, task: str
) -> None:
    (rank,) = installed(task, world=1, **options(tmp_path, steps=6, accumulation=2, fail_at=5))
    assert (rank["raised"], rank["restored"]) == ("no room", True)
    end = records(tmp_path / "logs", tmp_path / "out")[-1]
    assert (end["state"], end["error"], end["step"]) == ("failed", "MemoryError: no room", 2)


@pytest.mark.parametrize("task", TASKS)
def test_losses_are_those_of_the_run_without_it(installed: Ranks, tmp_path: Path, task: str) -> None:
    (on,) = installed(task, world=1, **options(tmp_path, steps=3))
    (off,) = installed(task, world=1, output=str(tmp_path / "off"), steps=3)
    assert on["losses"] == off["losses"]
    assert not (tmp_path / "off" / "training_logs").exists()


def test_log_that_cannot_be_opened_does_not_stop_training(installed: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    job = options(tmp_path, steps=3)
    job["environment"] = {"WANSHIM_PROGRESS_DIR": str(tmp_path / "file")}
    (rank,) = installed("train", world=1, **job)
    assert rank["micro"] == 3
    assert any(note.startswith("left to the framework: not recorded") for note in rank["notes"])
