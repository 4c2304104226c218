from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wanshim.core.training import progress_log
from wanshim.core.training.progress_log import ProgressLog, file_name, run_folder
from wanshim.monitor.runs import RunFolder


def record(folder: Path, steps: int, seconds: float = 0.0) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "tests.unit.training.recorded_run",
        str(folder),
        "0",
        "1",
        str(steps),
        str(seconds),
    ]
    return subprocess.Popen(command)


def only_log(folder: Path) -> Path:
    found = list(folder.glob("*/*.jsonl"))
    assert len(found) == 1
    return found[0]


def wait_for_steps(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        logs = list(folder.glob("*/*.jsonl"))
        if logs and logs[0].read_bytes().count(b"\n") > count:
            return
        time.sleep(0.005)
    raise AssertionError("the run logged nothing")


def test_killed_while_writing_loses_at_most_the_last_line_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    for _ in range(3):
        before = sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("*/*.jsonl"))
        job = record(tmp_path, 10_000_000, 0.0002)
        wait_for_steps(tmp_path, before + 200)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    job = record(tmp_path, 50)
    assert job.wait(timeout=30) == 0
    broken = 0
    last = 0
    attempts = 0
    for line in only_log(tmp_path).read_bytes().splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            broken += 1
            continue
        if found.get("event") == "start":
            attempts, last = attempts + 1, 0
        elif "event" not in found:
            assert found["step"] == last + 1  # none missing in between
            last = found["step"]
    assert attempts == 4
    assert broken <= 3
    runs = RunFolder(tmp_path)
    runs.update_fully()
    log = next(iter(runs.runs.values())).first
    assert log is not None
    assert (log.attempts, log.step, log.end["state"]) == (4, 50, "finished")


def test_torn_line_is_closed_off_before_the_next_attempt(tmp_path: Path) -> None:
    path = tmp_path / file_name(0, "cuda:0")
    path.write_bytes(b'{"step":1}\n{"step":2,"lo')
    log = ProgressLog(tmp_path, 0, ["cuda:0"])
    log.write({"event": "start"})
    log.close()
    assert path.read_bytes() == b'{"step":1}\n{"step":2,"lo\n{"event":"start"}\n'


def test_split_process_has_a_file_for_each_device_and_one_for_a_repeated_one(tmp_path: Path) -> None:
    log = ProgressLog(tmp_path, 3, ["cuda:0", "cuda:1", "cuda:0"])
    log.write({"step": 1}, {"cuda:1": {"memory": 5}})
    log.close()
    assert {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()} == {
        "rank-00003.cuda-0.jsonl": {"step": 1},
        "rank-00003.cuda-1.jsonl": {"step": 1, "memory": 5},
    }


def test_full_disk_ends_the_log_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = ProgressLog(tmp_path, 0, ["cpu"])

    def full(file: int, line: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(progress_log, "_append", full)
    log.write({"step": 1})
    log.write({"step": 2})
    assert [r.getMessage() for r in caplog.records] == [
        "wanshim: the progress log of cpu ends here: [Errno 28] No space left on device"
    ]


@pytest.mark.parametrize("output", ["../../etc", "a b/<script>", "..", "/", "x" * 300])
def test_run_folder_of_any_output_path_is_one_plain_name_below(tmp_path: Path, output: str) -> None:
    folder = run_folder(tmp_path, output)
    assert folder.parent == tmp_path
    assert folder.name.replace("-", "").replace(".", "").replace("_", "").isalnum()
    assert len(folder.name) < 70


def test_run_folder_tells_equal_names_of_different_parents_apart(tmp_path: Path) -> None:
    assert run_folder(tmp_path, "a/lora") != run_folder(tmp_path, "b/lora")
    assert run_folder(tmp_path, "a/lora") == run_folder(tmp_path, "a/../a/lora")
