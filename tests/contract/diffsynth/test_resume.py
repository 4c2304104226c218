"""The run that is resumed is the run: the same samples, draws, losses and files as one that was never stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import wanshim
from tests.contract.diffsynth.resume_job import files, seen, train
from tests.contract.diffsynth.resume_runs import Runs, said
from wanshim.adapters.diffsynth.resume import FEATURE
from wanshim.errors import FeatureUnavailable, ResumeInvalid

NAME = FEATURE.name


@pytest.fixture(autouse=True)
def _save_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the last state is on the disk: a due state never waits for one that is being written."""
    from wanshim.core.resume.writer import StateWriter

    monkeypatch.setenv("WANSHIM_RESUME", "auto")
    monkeypatch.setenv("WANSHIM_SAVE_EVERY", "1")
    monkeypatch.setattr(StateWriter, "busy", False)


def undisturbed(folder: Path, **job: Any) -> tuple[list[Any], dict[str, bytes]]:
    """Of DiffSynth alone."""
    wanshim.deactivate()
    train(folder, **job)
    return seen(folder, 0, 0), files(folder)


def note() -> str:
    return next(
        text for text in reversed(wanshim.report().row(NAME).notes) if " at step " in text or "from step" in text
    )


@pytest.mark.parametrize(
    ("job", "at"),
    [
        ({}, 3),
        ({"accumulation": 3, "workers": 2, "save_steps": 2}, 11),  # groups of 3, 3 and 1 an epoch
        ({"workers": 2}, 9),
        ({"customized_optimizer": "torch.optim.RMSprop", "save_steps": 3}, 6),  # the last batch of an epoch
    ],
)
def test_resumed_run_has_the_samples_draws_losses_and_files_of_the_undisturbed_one(
    tmp_path: Path, job: dict[str, Any], at: int
) -> None:
    if "customized_optimizer" in job and not _takes("customized_optimizer"):
        pytest.skip("this release has AdamW alone")
    expected, lora = undisturbed(tmp_path / "whole", **job)
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "out", at=at, end="error", **job)
    lost = at % job.get("accumulation", 1) if at < 7 else (at - 7) % job.get("accumulation", 1)
    train(tmp_path / "out", seed=99, attempt=1, **job)
    resumed = seen(tmp_path / "out", 0, 1)
    assert len(resumed) == 14 - at + lost
    assert seen(tmp_path / "out", 0, 0) == expected[:at]
    assert resumed == expected[at - lost :]
    assert files(tmp_path / "out") == lora
    assert note().startswith("goes on from step ")


def _takes(option: str) -> bool:
    import inspect

    from diffsynth.diffusion import runner

    return option in inspect.signature(runner.launch_training_task).parameters


def test_run_that_has_ended_trains_nothing_and_leaves_the_same_files(tmp_path: Path) -> None:
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=1)
    lora = files(tmp_path)
    train(tmp_path, epochs=1, seed=99, attempt=1)
    assert seen(tmp_path, 0, 1) == []
    assert files(tmp_path) == lora


def test_another_learning_rate_stops_with_a_table_and_goes_on_where_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    states = [path.read_bytes() for path in sorted(tmp_path.glob("training_state/run-1/*"))]
    with pytest.raises(ResumeInvalid, match=r"learning_rate +0\.01 +0\.02") as raised:
        train(tmp_path, attempt=1, learning_rate=2e-2)
    assert "WANSHIM_RESUME=auto,+learning_rate goes on nevertheless" in str(raised.value)
    with pytest.raises(ResumeInvalid, match="7 samples of Drawing") as raised:
        train(tmp_path, attempt=1, samples=8)
    assert [path.read_bytes() for path in sorted(tmp_path.glob("training_state/run-1/*"))] == states
    monkeypatch.setenv("WANSHIM_RESUME", "auto,+learning_rate")
    rates: list[float] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        train(tmp_path, attempt=2, learning_rate=2e-2)
    finally:
        handle.remove()
    assert len(seen(tmp_path, 0, 2)) == 11
    assert rates[0] == pytest.approx(2e-2 / 3)  # ConstantLR: a third for the first five steps
    assert rates[-1] == pytest.approx(2e-2)


def test_samples_a_step_are_not_changed_whatever_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    monkeypatch.setenv("WANSHIM_RESUME", "auto,+samples_per_step")
    with pytest.raises(ResumeInvalid, match="2: 1 x 2 accumulated") as raised:
        train(tmp_path, attempt=1, accumulation=2)
    assert "--gradient_accumulation_steps 1" in str(raised.value)


def test_new_begins_beside_the_old_run_which_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=1)
    old = {path.name: path.read_bytes() for path in tmp_path.glob("training_state/run-1/*")}
    monkeypatch.setenv("WANSHIM_RESUME", "new")
    train(tmp_path, epochs=1, attempt=1)
    assert len(seen(tmp_path, 0, 1)) == 7
    assert {path.name: path.read_bytes() for path in tmp_path.glob("training_state/run-1/*")} == old
    assert sorted(path.name for path in tmp_path.glob("training_state/*")) == ["run-1", "run-2"]


def test_cpu_offload_of_diffsynth_is_refused_by_name(tmp_path: Path) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(FeatureUnavailable, match="--enable_model_cpu_offload moves the trained weights"):
        train(tmp_path, enable_model_cpu_offload=True)


def test_progress_log_goes_on_at_the_resumed_batch(tmp_path: Path) -> None:
    wanshim.activate(f"none,{NAME},diffsynth.progress")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    train(tmp_path, attempt=1)
    (log,) = tmp_path.glob("training_logs/*/rank-00000.*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["done"] for line in lines if line.get("event") == "start"] == [0, 3]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 15))


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as started:
        yield started


def start(runs: Runs, folder: Path, processes: int = 1, **job: Any) -> list[int]:
    variables = {"WANSHIM_FEATURES": f"none,{NAME}", "WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"}
    return runs.start(folder, processes, variables, **job)


@pytest.mark.parametrize(
    ("end", "status", "more"), [("SIGKILL", -signal.SIGKILL, 0), ("SIGTERM", 75, 1), ("SIGINT", -signal.SIGINT, 1)]
)
def test_signal_ends_a_run_that_goes_on_as_if_it_had_not(
    tmp_path: Path, runs: Runs, end: str, status: int, more: int
) -> None:
    """SIGTERM and ctrl-C: after the step that they came in, with its state saved. SIGKILL: at once."""
    expected, lora = undisturbed(tmp_path / "whole")
    out = tmp_path / "out"
    assert start(runs, out, at=9, end=end) == [status], said(out)
    assert len(seen(out, 0, 0)) == 9 + more
    assert start(runs, out, attempt=1, seed=99) == [0], said(out, 1)
    resumed = seen(out, 0, 1)
    assert resumed == expected[-len(resumed) :]
    assert len(resumed) == 5 - more if more else 5 <= len(resumed) <= 7
    assert files(out) == lora


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, runs: Runs) -> Path:
    whole = tmp_path_factory.mktemp("two")
    assert start(runs, whole, 2) == [0, 0], said(whole)
    return whole


@pytest.mark.parametrize(("end", "only"), [("SIGKILL", 1), ("SIGUSR1", 0)])
def test_two_ddp_processes_go_on_with_their_shuffle_and_draws(
    tmp_path: Path, runs: Runs, of_two: Path, end: str, only: int
) -> None:
    """7 samples over 2 processes, 4 a process and epoch. One process is asked, both end at one step."""
    ends = start(runs, tmp_path, 2, at=5, end=end, only=only)
    assert ends == [75, 75] if end == "SIGUSR1" else ends[1] == -signal.SIGKILL, said(tmp_path)
    assert start(runs, tmp_path, 2, attempt=1, seed=99) == [0, 0], said(tmp_path, 1)
    for rank in (0, 1):
        expected, resumed = seen(of_two, rank, 0), seen(tmp_path, rank, 1)
        assert 0 < len(resumed) <= 4
        assert resumed == expected[-len(resumed) :]
    assert files(tmp_path) == files(of_two)
