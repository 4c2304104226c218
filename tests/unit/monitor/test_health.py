from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.unit.monitor.logs import END, folder_of, make_run, start_line, steps, write_log
from wanshim.cli.main import app
from wanshim.core.shared.processes import namespace
from wanshim.errors import SettingInvalid, WanshimError
from wanshim.monitor import runs as reading_runs
from wanshim.monitor import status, terminal
from wanshim.monitor.health import AHEAD_S, FIRST_STEP_S, Patience, problems
from wanshim.monitor.runs import RunFolder, RunLog

IMPATIENT = Patience(medians=10, floor_s=5)


def run_of(folder: Path) -> RunLog:
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
    assert f"loss has been {loss} since step 4" in problems(run_of(tmp_path))[0].message


def test_process_gone_without_an_end_is_named(tmp_path: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", "pass"])
    job.wait()
    write_log(make_run(tmp_path), [start_line(pid=job.pid, process_started=1), *steps(20)])
    assert kinds(tmp_path) == [("gone", 0)]


def test_reused_pid_is_not_the_process(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(process_started=1), *steps(20)])
    assert kinds(tmp_path) == [("gone", 0)]


@pytest.mark.parametrize(
    ("host", "where"),
    [("elsewhere", "elsewhere"), (socket.gethostname(), "elsewhere"), ("elsewhere", namespace())],
    ids=["host", "container in the network of its host", "host without a boot id"],
)
def test_process_of_another_host_or_container_is_judged_by_its_silence(host: str, where: str, tmp_path: Path) -> None:
    begin = start_line(pid=1, process_started=1, host=host, namespace=where)
    write_log(make_run(tmp_path), [begin, *steps(20)])
    assert kinds(tmp_path) == []


def test_rank_without_a_log_is_missed(tmp_path: Path) -> None:
    write_log(make_run(tmp_path, processes=2), [start_line(), *steps(20)])
    assert kinds(tmp_path) == [("gone", 1)]


def test_next_attempt_ends_the_alarm_of_the_last(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(process_started=1), *steps(20), start_line(), *steps(5)])
    assert kinds(tmp_path) == []
    found = status.of_run(run_of(tmp_path), IMPATIENT)
    assert (found["attempt"], found["current_step"], found["progress_percent"]) == (2, 5, 5)


def test_resumed_attempt_is_one_curve_with_a_mark(tmp_path: Path) -> None:
    """Steps 4 and 5 are trained again: their points are replaced."""
    first = [start_line(process_started=1), *steps(5, memory=1)]
    write_log(make_run(tmp_path), [*first, start_line(done=3), *list(steps(7, memory=2))[3:]])
    run = run_of(tmp_path)
    found = status.history(run)
    assert found["curve"]["x"] == found["gpus"][0]["x"] == list(range(1, 8))
    assert found["curve"]["memory"] == [1, 1, 1, 2, 2, 2, 2]
    assert found["resumed_at"] == [3]
    now = status.of_run(run, IMPATIENT)
    assert (now["resumed_at"], now["current_step"], now["attempt"]) == (3, 7, 2)
    console = Console(width=200, file=StringIO())
    console.print(terminal.render([now]))
    assert "resumed at step 3" in console.file.getvalue()  # type: ignore[attr-defined]


def test_run_that_stopped_with_its_state_saved_is_no_alarm(tmp_path: Path) -> None:
    stopped = {**END, "state": "stopped", "error": "SystemExit: 75", "resumes_at": 5}
    write_log(make_run(tmp_path), [start_line(), *steps(5), stopped])
    assert kinds(tmp_path) == []
    assert check(tmp_path)[0] == 0
    now = status.of_run(run_of(tmp_path), IMPATIENT)
    assert (now["state"], now["resumes_at"], now["eta_seconds"]) == ("stopped", 5, None)
    console = Console(width=200, file=StringIO())
    console.print(terminal.render([now]))
    assert "resumes at optimizer step 5" in console.file.getvalue()  # type: ignore[attr-defined]


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
        "no number": ([no_number], 1, "nan: rank 0: the loss has been nan since step 21"),
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


def test_problem_stands_on_a_line_of_its_own_below_the_bar(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(t=time.time() - 999), *steps(20, end=time.time() - 900)])
    printed = CliRunner().invoke(app, ["monitor", str(tmp_path)], env={"COLUMNS": "200"}).stdout.splitlines()
    assert any(line.startswith("rank 0: no step for 9") for line in printed), printed


def test_name_that_the_locale_cannot_write_is_printed_escaped(tmp_path: Path) -> None:
    write_log(make_run(tmp_path, name="läufe"), [start_line(), *steps(20)])
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    command = [sys.executable, "-m", "wanshim", "monitor", str(tmp_path)]
    done = subprocess.run(command, env=ascii_only, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"l\xe4ufe" in done.stdout


def test_monitor_without_a_terminal_prints_once(tmp_path: Path) -> None:
    write_log(make_run(tmp_path / "[bold]x"), [start_line(), *steps(50)])
    result = CliRunner().invoke(app, ["monitor", str(tmp_path)])
    assert result.exit_code == 0
    assert "[bold]x  running  step 50/100 (50.0 %)" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere"],
        [".", "--run", "../.."],
        [".", "--export", "xml"],
        [".", "--export", ""],
        [".", "--serve", "--check"],  # would never end
        [".", "--port", "7011"],
        [".", "--check", "--output", "there"],
        [".", "--serve", "--json"],
        [".", "--serve", "--export", "csv"],
        [".", "--check", "--stall-medians", "nan"],
        [".", "--check", "--stall-floor", "inf"],
        [".", "--check", "--stall-floor", "-1"],
    ],
)
def test_wrong_argument_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["monitor", *arguments])
    assert isinstance(result.exception, (WanshimError, SettingInvalid))


def age(folder: Path, seconds: float) -> None:
    """Let the files of a run be that old, by the clock of the file system."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def check(folder: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["monitor", str(folder), "--check", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


FAILED = {**END, "state": "failed", "error": "no room"}


def many_runs(folder: Path, count: int) -> None:
    """Finished runs a day old."""
    for number in range(count):
        run = make_run(folder / f"run-{number:04d}")
        write_log(run, [start_line(), *steps(1), END])
        age(run, 86400)


def test_check_finds_the_newest_run_behind_two_hundred_others(tmp_path: Path) -> None:
    many_runs(tmp_path, 200)
    write_log(make_run(tmp_path / "zz-last"), [start_line(), *steps(3), FAILED])
    code, said = check(tmp_path)
    assert code == 1
    assert "zz-last: failed: rank 0 failed: no room" in said


def test_check_counts_a_run_as_new_by_its_log_however_old_its_run_json(tmp_path: Path) -> None:
    write_log(make_run(tmp_path / "zz-old"), [start_line(), *steps(3), FAILED])
    age(tmp_path / "zz-old", 2 * 86400)
    many_runs(tmp_path, 200)
    assert "zz-old" not in check(tmp_path)[1].replace("(zz-old, ...)", "")
    os.utime(next((tmp_path / "zz-old").glob("*.jsonl")))
    assert "zz-old: failed" in check(tmp_path)[1]


def test_runs_left_out_are_said_and_are_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_runs, "MOST_RUNS", 3)
    many_runs(tmp_path, 3)
    assert check(tmp_path) == (0, "")
    write_log(make_run(tmp_path / "a-newer"), [start_line(), *steps(3)])
    write_log(make_run(tmp_path / "b-newer"), [start_line(), *steps(3)])
    code, said = check(tmp_path)
    assert code == 1
    assert "left out: the 2 oldest runs" in said
    for arguments in (["--json"], ["--export", "csv", "--output", str(tmp_path / "csv")], []):
        result = CliRunner().invoke(app, ["monitor", str(tmp_path), *arguments])
        assert "left" in result.output
    assert result.exit_code == 0


def test_run_beyond_the_newest_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_runs, "MOST_RUNS", 2)
    write_log(make_run(tmp_path / "old"), [start_line(), *steps(3), FAILED])
    age(tmp_path / "old", 2 * 86400)
    many_runs(tmp_path, 3)
    assert check(tmp_path, "--run", "old") == (1, "old: failed: rank 0 failed: no room\n")
    assert check(tmp_path, "--run", "run-0000") == (0, "")


def test_check_of_an_empty_folder_is_no_success(tmp_path: Path) -> None:
    code, said = check(tmp_path)
    assert code == 1
    assert said == f"{tmp_path}: empty: no run has logged here\n"


def test_run_json_beside_the_runs_hides_none_of_them(tmp_path: Path) -> None:
    write_log(make_run(tmp_path / "run"), [start_line(), *steps(3), FAILED])
    write_log(make_run(tmp_path / tmp_path.name), [start_line(), *steps(3), FAILED])
    write_log(make_run(tmp_path), [start_line(), *steps(3), END])
    code, said = check(tmp_path)
    assert (code, said.count("failed: no room")) == (1, 2)
    assert len(folder_of(tmp_path).runs) == 3


def test_logs_without_a_run_json_are_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_log(tmp_path / "run", [start_line(), *steps(3), FAILED])
    assert check(tmp_path) == (1, "run: failed: rank 0 failed: no room\n")


def test_run_that_never_logged_is_missed_after_the_time_of_a_first_step(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert check(tmp_path) == (0, "")
    age(tmp_path / "run", FIRST_STEP_S + 60)
    code, said = check(tmp_path)
    assert code == 1
    assert said.startswith("run: gone: no process has logged for 18")


@pytest.mark.parametrize("skew", [-7200.0, 7200.0], ids=["behind", "ahead"])
def test_clock_of_another_host_makes_no_stall_and_hides_none(tmp_path: Path, skew: float) -> None:
    end = time.time() + skew
    write_log(make_run(tmp_path), [start_line(host="elsewhere", t=end - 99), *steps(20, end=end)])
    assert kinds(tmp_path) == []
    assert status.of_run(run_of(tmp_path), IMPATIENT)["elapsed_seconds"] == pytest.approx(99)
    age(tmp_path, 300)
    assert kinds(tmp_path) == [("stalled", 0)]


def test_line_of_this_host_from_the_future_hides_no_stall(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(), *steps(20, end=time.time() + 1e6)])
    assert kinds(tmp_path) == []
    age(tmp_path, 300)
    assert kinds(tmp_path) == [("stalled", 0)]


def test_log_whose_file_is_from_the_future_is_said(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(host="elsewhere"), *steps(20)])
    age(tmp_path, -AHEAD_S - 60)
    assert kinds(tmp_path) == [("unread", 0)]


def test_attempt_on_another_device_ends_the_alarm_of_the_last(tmp_path: Path) -> None:
    write_log(make_run(tmp_path), [start_line(device="cuda:0", process_started=1), *steps(9)], device="cuda:0")
    age(tmp_path, 100)
    write_log(tmp_path, [start_line(device="cuda:1"), *steps(5)], device="cuda:1")
    assert kinds(tmp_path) == []
    assert [gpu["device"] for gpu in status.of_run(run_of(tmp_path), IMPATIENT)["gpus"]] == ["cuda:1"]


def test_many_ranks_with_one_problem_are_few_lines(tmp_path: Path) -> None:
    make_run(tmp_path / "run", processes=40)
    for rank in range(30):
        write_log(tmp_path / "run", [start_line(rank, process_started=1), *steps(9)], rank)
    code, said = check(tmp_path)
    assert code == 1
    assert len(said.splitlines()) == 9
    assert "run: gone: 32 more ranks: gone" in said


def test_processes_that_share_each_sample_are_all_shown_and_missed(tmp_path: Path) -> None:
    """Two groups of two: samples are divided between two, and four processes log."""
    folder = make_run(tmp_path / "one", processes=2) / "run.json"
    folder.write_text(folder.read_text().replace('"checkpoints"', '"processes": 4, "checkpoints"'))
    for rank in (0, 1, 3):
        write_log(folder.parent, [start_line(rank, f"cuda:{rank}"), *steps(20)], rank, f"cuda:{rank}")
    run = run_of(tmp_path)
    assert (run.processes, sorted(run.ranks)) == (4, [0, 1, 3])
    assert kinds(tmp_path) == [("gone", 2)]
