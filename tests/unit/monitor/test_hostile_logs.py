"""Whatever lies in the log directory, the monitor goes on and shows the rest."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from tests.unit.monitor.logs import make_run, start_line, steps, write_log
from wanshim.monitor import reading, status
from wanshim.monitor.curve import MOST_KEPT, Curve
from wanshim.monitor.health import USUAL
from wanshim.monitor.runs import RunFolder


def statuses(folder: Path) -> list[dict[str, object]]:
    return status.of_folder(status.folder_of(folder), USUAL)


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
]
TEXTS = ["start", "end", "checkpoint", "nan", "<b>"]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(TEXTS)
RECORDS = st.lists(st.dictionaries(st.sampled_from(KEYS), st.recursive(PLAIN, st.lists, max_leaves=3)))
COUNTS = st.dictionaries(st.sampled_from(["recorded_steps", "processes", "recorded_group", "epochs"]), PLAIN)
RUNS = st.dictionaries(st.sampled_from(["accounting", "checkpoints", "validations", "name"]), PLAIN | COUNTS)


@fuzz(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(RECORDS, RUNS)
def test_any_json_in_the_logs_gives_a_status_that_is_json(
    tmp_path: Path, records: list[dict[str, object]], run: dict[str, object]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run))
    path = folder / "rank-00000.cuda-0.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    runs = status.folder_of(tmp_path)
    json.dumps(status.of_folder(runs, USUAL), allow_nan=False)
    json.dumps(status.history(runs.runs["run"]), allow_nan=False)


def test_file_of_a_gigabyte_is_read_in_pieces_and_memory_stays_small(tmp_path: Path) -> None:
    path = write_log(make_run(tmp_path / "run"), [start_line(), *steps(3)])
    with path.open("r+b") as file:  # sparse: a gigabyte of zeros without a newline
        file.truncate(2**30)
    runs = RunFolder(tmp_path)
    begin = time.monotonic()
    runs.update()
    took = time.monotonic() - begin
    tail = runs.runs["run"].first.tail  # type: ignore[union-attr]
    assert tail.behind == 2**30 - reading.CHUNK
    assert len(tail._rest) == 0  # an endless line is dropped, not kept
    assert runs.runs["run"].first.step == 3  # type: ignore[union-attr]
    assert took < 10  # a bound against reading it all, not a measure


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
    runs = status.folder_of(tmp_path)
    path.unlink()
    write_log(tmp_path / "run", [start_line(), *steps(2)])
    runs.update()
    assert status.of_folder(runs, USUAL)[0]["current_step"] == 2


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
