from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wanshim.core.training.accounting import StepAccounting
from wanshim.core.training.recorder import RunRecorder, TrainingRun
from wanshim.core.training.recording import RESUMES_AT, closing

RUN = TrainingRun("lora", "test 1.0", "out/lora", StepAccounting(6))


def end_of(recorder: RunRecorder) -> Any:
    return json.loads(next(recorder.folder.glob("*.jsonl")).read_text().splitlines()[-1])


def test_log_of_a_run_that_fails_closes_with_the_begin_of_its_error(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, RUN, 0, ["cpu"])
    with pytest.raises(KeyError), closing(lambda: recorder):
        raise KeyError("x" * 600)
    end = end_of(recorder)
    assert (end["state"], end["error"]) == ("failed", ("KeyError: '" + "x" * 600)[:500])


def test_log_of_a_run_that_stopped_with_its_state_saved_says_where_it_resumes(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, RUN, 0, ["cpu"])
    end = SystemExit(75)
    setattr(end, RESUMES_AT, 12)
    with pytest.raises(SystemExit), closing(lambda: recorder):
        raise end
    found = end_of(recorder)
    assert (found["state"], found["resumes_at"]) == ("stopped", 12)


def test_log_opened_while_the_run_lasts_closes_as_finished(tmp_path: Path) -> None:
    opened: list[RunRecorder] = []
    with closing(lambda: opened[0] if opened else None):
        opened.append(RunRecorder(tmp_path, RUN, 0, ["cpu"]))
    assert end_of(opened[0])["state"] == "finished"


def test_run_without_a_log_raises_its_own_error() -> None:
    with pytest.raises(KeyError), closing(lambda: None):
        raise KeyError("x")
