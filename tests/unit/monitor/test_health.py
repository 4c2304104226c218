from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.monitor.logs import END, make_run, start_line, steps, write_log
from wanshim.cli.main import app
from wanshim.monitor import status
from wanshim.monitor.health import Patience, problems
from wanshim.monitor.runs import Run, RunFolder

IMPATIENT = Patience(medians=10, floor_s=5)


def run_of(folder: Path) -> Run:
    runs = RunFolder(folder)
    runs.update_fully()
    return next(iter(runs.runs.values()))


def kinds(folder: Path, patience: Patience = IMPATIENT) -> list[tuple[str, int | None]]:
    return [(problem.kind, problem.rank) for problem in problems(run_of(folder), patience)]


def test_run_that_steps_has_no_problem(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(), *steps(20)])
    assert kinds(tmp_path) == []


@pytest.mark.parametrize(
    ("silence", "seconds", "stalled"),
    [(4.0, 0.1, False), (6.0, 0.1, True), (30.0, 4.0, False), (50.0, 4.0, True)],
    ids=["under the floor", "over the floor", "under ten medians", "over ten medians"],
)
def test_silence_of_several_medians_is_a_stall(tmp_path: Path, silence: float, seconds: float, stalled: bool) -> None:
    end = time.time() - silence
    write_log(make_run(tmp_path), [start_line(t=end - 99), *steps(20, seconds=seconds, end=end)])
    assert kinds(tmp_path) == ([("stalled", 0)] if stalled else [])
    assert status.of_run(run_of(tmp_path), IMPATIENT)["eta_seconds"] == (
        None if stalled else pytest.approx(80 * seconds)
    )


def test_saving_a_checkpoint_is_no_stall(tmp_path: Path) -> None:
    end = time.time() - 60
    records = [start_line(t=end - 99), *steps(20, end=end)]
    write_log(make_run(tmp_path), [*records, {"event": "checkpoint", "t": end, "step": 20}])
    assert kinds(tmp_path) == []


def test_first_step_may_take_as_long_as_loading_takes(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(t=time.time() - 600)])
    assert kinds(tmp_path) == []
    assert status.of_run(run_of(tmp_path), IMPATIENT)["state"] == "starting"


def test_rank_behind_the_others_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, processes=2)
    write_log(tmp_path, [start_line(0), *steps(20)], 0)
    write_log(tmp_path, [start_line(1), *steps(10)], 1)
    assert kinds(tmp_path) == [("behind", 1)]


def test_rank_one_step_behind_is_jitter(tmp_path: Path) -> None:
    make_run(tmp_path, processes=2)
    write_log(tmp_path, [start_line(0), *steps(20)], 0)
    write_log(tmp_path, [start_line(1), *steps(19)], 1)
    assert kinds(tmp_path) == []


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_loss_that_is_no_number_is_named(tmp_path: Path, loss: str) -> None:
    write_log(make_run(tmp_path), [start_line(), *steps(3), *list(steps(6, loss=loss))[3:]])
    assert kinds(tmp_path) == [("nan", 0)]
    assert f"loss is {loss} since step 4" in problems(run_of(tmp_path))[0].message


def test_process_gone_without_an_end_is_named(tmp_path: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", "pass"])
    job.wait()
    write_log(make_run(tmp_path), [start_line(pid=job.pid, process_started=1), *steps(20)])
    assert kinds(tmp_path) == [("gone", 0)]


def test_reused_pid_is_not_the_process(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(process_started=1), *steps(20)])
    assert kinds(tmp_path) == [("gone", 0)]


def test_process_of_another_host_is_judged_by_its_silence(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(pid=1, process_started=1, host="elsewhere"), *steps(20)])
    assert kinds(tmp_path) == []


def test_rank_without_a_log_is_missed(tmp_path: Path) -> None:
    write_log(make_run(tmp_path, processes=2), [start_line(), *steps(20)])
    assert kinds(tmp_path) == [("gone", 1)]


def test_next_attempt_ends_the_alarm_of_the_last(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(process_started=1), *steps(20), start_line(), *steps(5)])
    assert kinds(tmp_path) == []
    found = status.of_run(run_of(tmp_path), IMPATIENT)
    assert (found["attempt"], found["current_step"], found["progress_percent"]) == (2, 5, 5)


def silent_for(seconds: float, *more: dict[str, object]) -> list[dict[str, object]]:
    """A process whose twentieth and last step is `seconds` ago."""
    end = time.time() - seconds
    return [start_line(t=end - 99), *steps(20, end=end), *({"t": end, **record} for record in more)]


def checks() -> dict[str, tuple[list[list[dict[str, object]]], int, str]]:
    """Made when a test runs: the silences count from then. The logs of each rank, exit status, what is said."""
    here, failed = silent_for(0), {**END, "state": "failed", "error": "no room"}
    no_number = [*here, *list(steps(22, loss="nan"))[20:]]
    return {
        "steps": ([here], 0, ""),
        "starts": ([[start_line(t=time.time() - 600)]], 0, ""),
        "saves a checkpoint": ([silent_for(300, {"event": "checkpoint", "step": 20})], 0, ""),
        "finished": ([silent_for(9e5, END)], 0, ""),
        "one rank a step behind": ([here, here[:-1]], 0, ""),
        "no step": ([silent_for(300)], 1, "stalled: rank 0: no step for 3.. s, after step 20"),
        "no first step": ([[start_line(t=time.time() - 4000)]], 1, "stalled: rank 0: no step for 40.. s, after step 0"),
        "checkpoint without end": ([silent_for(3000, {"event": "checkpoint"})], 1, "stalled: rank 0"),
        "one rank silent": ([here, silent_for(300)], 1, "stalled: rank 1: no step for 3.. s"),
        "one rank behind": ([here, here[:10]], 1, "behind: rank 1 is at step 9, the first at 20"),
        "no number": ([no_number], 1, "nan: rank 0: the loss is nan since step 21"),
        "one process gone": ([here, [start_line(process_started=1), *here[1:]]], 1, "gone: rank 1 .process"),
        "one rank without a log": ([here, []], 1, "gone: rank 1 has no log"),
        "failed": ([silent_for(0, failed)], 1, "failed: rank 0 failed: no room"),
    }


@pytest.mark.parametrize("case", list(checks()))
def test_check_exits_with_1_where_a_run_is_in_trouble(tmp_path: Path, case: str) -> None:
    ranks, code, said = checks()[case]
    folder = make_run(tmp_path / "one", processes=len(ranks))
    for rank, records in enumerate(ranks):
        if records:
            write_log(folder, records, rank, f"cuda:{rank}")
    result = CliRunner().invoke(app, ["monitor", str(tmp_path), "--check"])
    assert result.exit_code == code, result.output
    assert re.search(f"^one: {said}", result.output) if code else result.output == ""


def test_check_of_a_stall_uses_the_patience_given(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(t=time.time() - 99), *steps(20, end=time.time() - 20)])
    assert CliRunner().invoke(app, ["monitor", str(tmp_path), "--check"]).exit_code == 0
    arguments = ["monitor", str(tmp_path), "--check", "--stall-floor", "10"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "stalled: rank 0: no step for 2" in result.output


def test_monitor_without_a_terminal_prints_once(tmp_path: Path) -> None:
    write_log(make_run(tmp_path / "[bold]x"), [start_line(), *steps(50)])
    result = CliRunner().invoke(app, ["monitor", str(tmp_path)])
    assert result.exit_code == 0
    assert "[bold]x  running  step 50/100 (50.0 %)" in result.output


@pytest.mark.parametrize("arguments", [["nowhere"], [".", "--run", "../.."], [".", "--export", "xml"]])
def test_wrong_argument_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    from wanshim.errors import MonitorInvalid

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["monitor", *arguments])
    assert isinstance(result.exception, MonitorInvalid)
