"""Whatever lies in the log directory, the monitor goes on and shows the rest."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given
from hypothesis import settings as fuzz
from hypothesis import strategies as st
from rich.console import Console

from tests.unit.monitor.logs import END, folder_of, make_run, start_line, steps, write_log
from wanshim.cli.main import app
from wanshim.errors import LogUnreadable
from wanshim.monitor import export, reading, runs, status, terminal
from wanshim.monitor.curve import MOST_KEPT, Curve
from wanshim.monitor.health import USUAL
from wanshim.monitor.runs import RunFolder


def statuses(folder: Path) -> list[dict[str, object]]:
    return status.of_folder(folder_of(folder), USUAL)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x00\xff\xfe\x80" * 100 + b"\n",
        b'{"step":3,"lo\n',
        b"[" * 50_000 + b"\n",
        b'{"step":1e999,"seconds":1}\n{"step":-1,"seconds":1}\n{"step":true,"seconds":1}\n',
        b'{"step":' + b"9" * 5000 + b',"seconds":1}\n',
        b'{"step":4,"seconds":"fast"}\n{"step":4,"seconds":NaN}\n{"step":4}\n',
        b"x" * (3 * reading.LONGEST_LINE) + b"\n",
        b'[1]\n"text"\nnull\n',
    ],
    ids=["binary", "half line", "deep", "no steps", "huge number", "no seconds", "long line", "no objects"],
)
def test_damaged_lines_are_counted_and_the_others_are_read(tmp_path: Path, rubbish: bytes) -> None:
    path = write_log(make_run(tmp_path / "run"), [start_line(), *steps(2)])
    with path.open("ab") as file:
        file.write(rubbish)
    write_log(tmp_path / "run", list(steps(5))[2:])
    found = statuses(tmp_path)[0]
    assert found["current_step"] == 5
    assert found["damaged_lines"]
    json.dumps(found, allow_nan=False)


KEYS = [
    "step",
    "t",
    "seconds",
    "loss",
    "event",
    "pid",
    "devices",
    "rank",
    "host",
    "memory",
    "device",
    "state",
    "error",
    "done",
    "resumes_at",
]
TEXTS = ["start", "end", "checkpoint", "nan", "<b>"]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(TEXTS)
RECORDS = st.lists(st.dictionaries(st.sampled_from(KEYS), st.recursive(PLAIN, st.lists, max_leaves=3)))
COUNTS = st.dictionaries(st.sampled_from(["recorded_steps", "processes", "recorded_group", "epochs"]), PLAIN)
RUNS = st.dictionaries(
    st.sampled_from(["accounting", "processes", "checkpoints", "validations", "name"]), PLAIN | COUNTS
)


@pytest.mark.slow
@fuzz(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(RECORDS, RUNS)
def test_any_json_in_the_logs_gives_a_status_that_is_json(
    tmp_path: Path, records: list[dict[str, object]], run: dict[str, object]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run))
    path = folder / "rank-00000.cuda-0.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = folder_of(tmp_path)
    json.dumps(status.of_folder(found, USUAL), allow_nan=False)
    json.dumps(status.history(found.runs["run"]), allow_nan=False)


def test_file_of_a_gigabyte_is_read_in_pieces_and_memory_stays_small(tmp_path: Path) -> None:
    path = write_log(make_run(tmp_path / "run"), [start_line(), *steps(3)])
    with path.open("r+b") as file:  # sparse: a gigabyte of zeros without a newline
        file.truncate(2**30)
    found = RunFolder(tmp_path)
    found.update()
    tail = found.runs["run"].first.tail  # type: ignore[union-attr]
    assert tail.behind == 2**30 - reading.CHUNK
    assert len(tail._rest) == 0  # an endless line is dropped, not kept
    assert found.runs["run"].first.step == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["run.json", "rank-00000.cuda-0.jsonl"])
def test_link_out_of_the_directory_is_not_followed(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"name": "SECRET", "event": "start", "device": "SECRET"}) + "\n")
    logs = tmp_path / "logs"
    folder = make_run(logs / "run")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    assert "SECRET" not in json.dumps(statuses(logs))


def test_linked_folder_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run").symlink_to(tmp_path / "elsewhere")
    assert statuses(tmp_path / "logs") == []


def test_pipe_in_place_of_a_log_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(make_run(tmp_path / "run") / "rank-00000.cuda-0.jsonl")
    assert statuses(tmp_path)[0]["current_step"] == 0


def test_half_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"a":1}\n{"b"')
    tail = reading.Tail(path)
    assert list(tail.read()) == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b":2}\n")
    assert list(tail.read()) == [{"b": 2}]
    assert tail.damaged == 0


def test_replaced_log_is_read_anew(tmp_path: Path) -> None:
    path = write_log(make_run(tmp_path / "run"), [start_line(), *steps(9)])
    found = folder_of(tmp_path)
    path.unlink()
    write_log(tmp_path / "run", [start_line(), *steps(2)])
    found.update()
    assert status.of_folder(found, USUAL)[0]["current_step"] == 2


def test_curve_keeps_its_spike_when_thinned() -> None:
    curve = Curve(("loss",))
    for x in range(10_000):
        curve.add(x, loss=100.0 if x == 5_003 else float("nan") if x % 2 else 1.0)
    thin = curve.thinned(200)
    assert len(thin["x"]) <= 202
    assert max(value for value in thin["loss"] if value is not None) == 100.0
    assert thin["x"][-1] == 9_999
    assert curve.thinned(200, after=9_997)["x"] == [9_998, 9_999]


def test_curve_stays_bounded() -> None:
    curve = Curve(("loss",))
    for x in range(MOST_KEPT + 10):
        curve.add(x, loss=0.0)
    assert len(curve) <= MOST_KEPT // 2 + 10


def shown(folder: Path) -> str:
    """What the terminal view prints."""
    text = io.StringIO()
    terminal.watch(RunFolder(folder), USUAL, Console(file=text, width=200))
    return text.getvalue()


def overflowing() -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Lines of a log, each number of them finite, and what run.json says beside the usual."""
    most = 1.7e308
    return {
        "time": ([start_line(t=-most), *steps(2, end=most)], {}),
        "time without an end": ([start_line(), {"step": 1, "seconds": 1.0, "t": most}], {}),
        "pace": ([start_line(), *steps(4, seconds=most, end=0.0)], {}),
        "sums of a group": ([start_line(), *steps(9, seconds=most, end=0.0)], {"accounting": {"recorded_group": 4}}),
        "ETA": ([start_line(), *steps(4, seconds=1e300, end=0.0)], {"accounting": {"recorded_steps": 2**53}}),
        "ETA of pauses": (
            [start_line(), *steps(4, checkpoint_seconds=1e300, validation_seconds=most)],
            {"checkpoints": 2**53, "validations": 2**53},
        ),
        "steps of many attempts": (
            [line for _ in range(2000) for line in (start_line(), {"step": 2**53, "seconds": 0.0, "t": 1.0})],
            {},
        ),
        "memory": ([start_line(), *steps(2, memory=most, memory_total=-most, utilisation=most, loss=most)], {}),
        "whole number": ([start_line(), *steps(2, memory=10**400, loss=-(10**400), lr=10**400)], {}),
    }


@pytest.mark.parametrize("case", list(overflowing()))
def test_finite_numbers_that_overflow_when_combined_leave_all_runs_shown(tmp_path: Path, case: str) -> None:
    lines, more = overflowing()[case]
    write_log(make_run(tmp_path / "good"), [start_line(), *steps(5)])
    write_log(make_run(tmp_path / "bad", **more), lines)
    found = folder_of(tmp_path)
    json.dumps([status.of_folder(found, USUAL), [status.history(run) for run in found.runs.values()]], allow_nan=False)
    assert {run["id"]: run["problems"] for run in status.of_folder(found, USUAL)}["good"] == []
    assert "good  running" in shown(tmp_path)
    for kind in export.EXPORTS:
        if kind == "tensorboard":
            pytest.importorskip("tensorboard", reason="tensorboard is not installed")
        export.EXPORTS[kind](found.runs["bad"], tmp_path / kind)


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b2J\x1b]52;c;b3duZWQ=\x1b\\\r\n\u202egood: fine\u2028\udc9b\ud800"


def evil_run(folder: Path) -> None:
    begin = start_line(device=EVIL, gpu_absent=EVIL, devices=[EVIL], process_started=1)
    bad_loss = [{"step": 9, "seconds": 1.0, "loss": "nan"}, {"step": 10, "seconds": 1.0, "loss": {EVIL: EVIL}}]
    write_log(make_run(folder / "evil", name=EVIL, framework=EVIL), [begin, *steps(3), *bad_loss])
    end = {**END, "state": EVIL, "error": EVIL}
    write_log(make_run(folder / "failed", name=EVIL), [start_line(), *steps(3), end])
    write_log(make_run(folder / "\x1b]0;owned\x07\udcff\n", name=""), [start_line(), *steps(3), end])


def test_terminal_escapes_and_half_characters_reach_neither_view_nor_check(tmp_path: Path) -> None:
    evil_run(tmp_path)
    outputs = [shown(tmp_path)]
    for arguments in (["--check"], ["--json"], ["--export", "csv", "--output", str(tmp_path / "csv")], ["--run", "x"]):
        result = CliRunner().invoke(app, ["monitor", str(tmp_path), *arguments])
        outputs.append(result.output + ("" if isinstance(result.exception, SystemExit) else str(result.exception)))
    for output in outputs:
        assert "owned" in output
        assert all(c.isprintable() or c == "\n" for c in output)
    assert len(outputs[1].splitlines()) == 4  # one line a problem: gone, nan, failed, failed


def test_two_names_that_print_alike_are_two_runs(tmp_path: Path) -> None:
    for name in ("run\x01", "run\x02", "run\udcff"):
        write_log(make_run(tmp_path / name, name=""), [start_line(), *steps(3)])
    assert len({run["id"] for run in statuses(tmp_path)}) == 3


def test_log_removed_while_it_is_exported_ends_the_export_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1000)
    path = write_log(make_run(tmp_path / "run"), [start_line(), *steps(50)])
    log = folder_of(tmp_path).runs["run"].first
    assert log is not None
    rows = export.rows(log)
    assert next(rows)[1] == 1
    path.unlink()
    with pytest.raises(LogUnreadable, match="No such file"):
        list(rows)


def test_log_that_grows_while_it_is_exported_is_exported_as_large_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1000)
    lines = list(steps(4000))
    write_log(make_run(tmp_path / "run"), [start_line(), *lines[:50]])
    log = folder_of(tmp_path).runs["run"].first
    assert log is not None
    found = []
    for _, step, _ in export.rows(log):
        found.append(step)
        assert step < 1000, "the export follows its log"
        write_log(tmp_path / "run", lines[50 + 10 * step :][:10])
    assert set(range(1, 51)) <= set(found)


def test_exports_go_on_past_a_log_that_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_log(make_run(tmp_path / "logs" / name), [start_line(), *steps(3)])
    rows = export.rows

    def vanishing(log: Any) -> Any:
        if log.tail.path.parent.name == "a":
            log.tail.path.unlink()
        return rows(log)

    monkeypatch.setattr(export, "rows", vanishing)
    arguments = ["monitor", str(tmp_path / "logs"), "--export", "csv", "--output", str(tmp_path / "csv")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "a: unread: " in result.output
    assert [path.relative_to(tmp_path / "csv").as_posix() for path in (tmp_path / "csv").rglob("*.csv")] == [
        "b/rank-00000.cuda-0.csv"
    ]


def test_log_removed_while_it_is_read_is_said_and_read_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1000)
    path = write_log(make_run(tmp_path / "run"), [start_line(), *steps(50)])
    found = RunFolder(tmp_path)
    found.update()
    assert found.runs["run"].reading
    path.unlink()
    found.update()
    assert not found.runs["run"].reading
    (problem,) = status.of_folder(found, USUAL)[0]["problems"]
    assert problem["message"] == "rank 0: its log cannot be read: No such file or directory"


def test_export_follows_no_link_where_it_writes(tmp_path: Path) -> None:
    write_log(make_run(tmp_path / "logs" / "run"), [start_line(), *steps(3)])
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "csv" / "run").mkdir(parents=True)
    for name in ("rank-00000.cuda-0.csv", "rank-00000.cuda-0.csv.partial"):
        (tmp_path / "csv" / "run" / name).symlink_to(tmp_path / "mine")
    export.to_csv(folder_of(tmp_path / "logs").runs["run"], tmp_path / "csv" / "run")
    assert (tmp_path / "mine").read_text() == "mine"


def test_small_files_give_a_small_answer(tmp_path: Path) -> None:
    for number in range(40):
        write_log(make_run(tmp_path / f"run{number}", processes=4096), [start_line(), *steps(3)])
    found = folder_of(tmp_path)
    answer = json.dumps(status.of_folder(found, USUAL))
    read = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    assert len(answer) < 5 * read
    messages = [problem["message"] for problem in status.of_folder(found, USUAL)[0]["problems"]]
    assert messages[0] == "rank 1 has no log"
    assert messages[-1] == "4087 more ranks have no log"
    assert len(messages) == 9


def test_run_of_a_thousand_ranks_shows_those_in_trouble_and_says_how_many_it_leaves_out(tmp_path: Path) -> None:
    make_run(tmp_path / "run", processes=1000)
    for rank in range(1000):
        begin = start_line(rank, process_started=1) if rank == 777 else start_line(rank)
        write_log(tmp_path / "run", [begin, *steps(2)], rank)
    found = folder_of(tmp_path)
    (run,) = status.of_folder(found, USUAL)
    assert (len(run["gpus"]), run["gpus_left_out"]) == (status.MOST_DEVICES, 1000 - status.MOST_DEVICES)
    assert {gpu["rank"]: gpu["state"] for gpu in run["gpus"]}[777] == "gone"
    assert len(status.history(found.runs["run"])["gpus"]) == status.MOST_DEVICES


def test_logs_beyond_those_read_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST_LOGS", 2)
    make_run(tmp_path / "run", processes=3)
    for rank in range(3):
        write_log(tmp_path / "run", [start_line(rank), *steps(1)], rank)
    assert "logs are left out" in json.dumps(statuses(tmp_path)[0]["problems"])


def test_run_that_cannot_be_looked_into_is_said_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "locked"):
        write_log(make_run(tmp_path / name), [start_line(), *steps(3)])
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = {run["id"]: run["state"] for run in statuses(tmp_path)}
    assert found == {"good": "running", "locked": "unread"}


def test_fault_of_ours_in_one_run_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "bad"):
        write_log(make_run(tmp_path / name), [start_line(), *steps(3)])
    of_run = status.of_run

    def failing(run: Any, *rest: Any) -> Any:
        if run.id == "bad" and run.logs:
            raise ZeroDivisionError("foreseen by nobody")
        return of_run(run, *rest)

    monkeypatch.setattr(status, "of_run", failing)
    found = {run["id"]: (run["state"], run["problems"]) for run in statuses(tmp_path)}
    assert found["good"] == ("running", [])
    assert found["bad"][0] == "unread"
    assert "ZeroDivisionError" in found["bad"][1][0]["message"]
