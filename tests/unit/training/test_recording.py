from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from wanshim.core.training.accounting import StepAccounting
from wanshim.core.training.recorder import TrainingRun
from wanshim.core.training.recording import RESUMES_AT, Recording

RUN = TrainingRun("lora", "test 1.0", "out/lora", StepAccounting(6))


def opened(folder: Path, said: list[str] | None = None, rank: int = 0) -> Recording:
    take = [].append if said is None else said.append
    made = Recording(str(folder), "a.progress", strict=False, note=take, without_effect=take)
    made.open(lambda: (RUN, rank, ["cpu"]))
    return made


def end_of(recording: Recording) -> Any:
    assert recording.recorder is not None
    return json.loads(next(recording.recorder.folder.glob("*.jsonl")).read_text().splitlines()[-1])


def test_log_of_a_run_that_fails_closes_with_the_begin_of_its_error(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    with pytest.raises(KeyError), recorder.of_run():
        raise KeyError("x" * 600)
    end = end_of(recorder)
    assert (end["state"], end["error"]) == ("failed", ("KeyError: '" + "x" * 600)[:500])


def test_log_of_a_run_that_stopped_with_its_state_saved_says_where_it_resumes(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    end = SystemExit(75)
    setattr(end, RESUMES_AT, 12)
    with pytest.raises(SystemExit), recorder.of_run():
        raise end
    found = end_of(recorder)
    assert (found["state"], found["resumes_at"]) == ("stopped", 12)


@pytest.mark.parametrize(
    ("code", "state", "error"),
    [
        (None, "finished", None),
        (0, "finished", None),
        (3, "failed", "SystemExit: 3"),
        ("no", "failed", "SystemExit: no"),
        ("", "failed", "SystemExit: "),  # Python ends with status 1 for it
        (0.0, "failed", "SystemExit: 0.0"),
    ],
)
def test_log_of_a_program_that_ends_itself_has_the_state_of_its_status(
    code: object, state: str, error: str | None, tmp_path: Path
) -> None:
    recorder = opened(tmp_path)
    with pytest.raises(SystemExit), recorder.of_run():
        raise SystemExit(code)
    end = end_of(recorder)
    assert (end["state"], end.get("error")) == (state, error)


def test_log_opened_while_the_run_lasts_closes_as_finished(tmp_path: Path) -> None:
    said: list[str] = []
    recording = Recording(str(tmp_path), "a.progress", strict=False, note=said.append, without_effect=said.append)
    with recording.of_run():
        recording.open(lambda: (RUN, 3, ["cpu"]))
    assert end_of(recording)["state"] == "finished"
    assert said == [f"rank 3 on cpu logs to {recording.recorder.folder}"]


def test_run_without_a_step_is_not_recorded_and_raises_its_own_error(tmp_path: Path) -> None:
    said: list[str] = []
    recording = Recording(str(tmp_path), "a.progress", strict=False, note=said.append, without_effect=said.append)
    with pytest.raises(KeyError), recording.of_run():
        raise KeyError("x")
    assert not said
    with recording.of_run():
        pass
    assert said == ["not recorded: no step ran"]


@pytest.mark.parametrize("strict", [False, True])
def test_run_that_cannot_be_described_goes_on_unless_strict(tmp_path: Path, strict: bool) -> None:
    def describe() -> Any:
        raise ValueError("no device")

    said: list[str] = []
    recording = Recording(str(tmp_path), "a.progress", strict=strict, note=said.append, without_effect=said.append)
    with pytest.raises(ValueError, match="no device") if strict else nullcontext(), recording.of_run():
        recording.open(describe)
    assert recording.recorder is None
    assert said == ([] if strict else ["not recorded: no device"])
