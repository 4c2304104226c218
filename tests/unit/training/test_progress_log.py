from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.monitor.logs import folder_of
from wanshim.core.shared.files import OwnFolder
from wanshim.core.training import progress_log
from wanshim.core.training.accounting import StepAccounting
from wanshim.core.training.progress_log import ProgressLog, file_name, run_folder, write_run
from wanshim.core.training.recorder import RunRecorder, TrainingRun
from wanshim.errors import WanshimError
from wanshim.monitor import status
from wanshim.monitor.health import USUAL
from wanshim.monitor.runs import RunFolder


def record(folder: Path, steps: int, *more: str) -> subprocess.Popen[str]:
    """A process that records; with "lead" it prints each step it made."""
    command = [sys.executable, "-m", "tests.unit.training.recorded_run", str(folder), "0", "1", str(steps), "0", "run"]
    return subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def make_steps(job: subprocess.Popen[str], count: int) -> None:
    assert job.stdout is not None
    for _ in range(count):
        assert job.stdout.readline(), "the job ended"


def make_steps_until_logged(job: subprocess.Popen[str], folder: Path) -> None:
    """Until the recorder's thread has written a hundred steps of this job's process."""

    def logged() -> int:
        texts = (path.read_text().partition(f'"pid":{job.pid},')[2] for path in folder.glob("*/*.jsonl"))
        return max((text.count('"loss"') for text in texts), default=0)

    while logged() < 100:
        make_steps(job, 100)


def only_log(folder: Path) -> Path:
    found = list(folder.glob("*/*.jsonl"))
    assert len(found) == 1
    return found[0]


def test_killed_while_writing_loses_at_most_the_last_line_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    for _ in range(3):
        job = record(tmp_path, 10_000_000, "lead")
        make_steps_until_logged(job, tmp_path)
        os.kill(job.pid, signal.SIGKILL)
        job.communicate()
    job = record(tmp_path, 50)
    assert job.communicate(timeout=60) == ("", "")  # a killed job holds nothing that the next one warns of
    assert job.returncode == 0
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


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the user's, which ends as it was."""
    path = tmp_path / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("link", "found"), [(Path.symlink_to, "is a symbolic link"), (Path.hardlink_to, "is another name of a file")]
)
def test_log_that_is_a_link_is_not_written_through(
    tmp_path: Path, victim: Path, link: Callable[[Path, Path], None], found: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    link(folder / file_name(0, "cpu"), victim)
    with pytest.raises(WanshimError, match=found):
        ProgressLog(folder, 0, ["cpu"])
    assert [path.name for path in folder.iterdir()] == [file_name(0, "cpu")]  # nothing is left behind


def test_lock_that_is_a_link_is_not_written_through(tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".rank-00000.lock").symlink_to(victim)
    with pytest.raises(WanshimError, match="is a symbolic link"):
        ProgressLog(folder, 0, ["cpu"])


def test_run_json_is_written_under_no_name_that_others_can_guess(tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (f".run.json.{os.getpid()}", ".run.json", "run.json.tmp", "run.json"):
        (folder / name).symlink_to(victim)
    write_run(folder, {"name": "x"})
    assert json.loads((folder / "run.json").read_text())["name"] == "x"
    assert not (folder / "run.json").is_symlink()


def test_folder_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WanshimError, match="is a symbolic link"):
        ProgressLog(tmp_path / "run", 0, ["cpu"])
    with pytest.raises(WanshimError, match="is a symbolic link"):
        write_run(tmp_path / "run", {})
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "run", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(OwnFolder, "_owner_of_a_new_file", lambda folder: 12345)
    with pytest.raises(WanshimError, match="belongs to user"):
        ProgressLog(tmp_path / "run", 0, ["cpu"])


def test_folder_of_a_share_that_takes_root_for_nobody_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ProgressLog(tmp_path / "run", 0, ["cpu"]).close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # not whom the file system calls the writer
    ProgressLog(tmp_path / "run", 0, ["cpu"]).close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [file_name(0, "cpu")]


def test_folder_that_others_may_write_is_taken_from_them(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    ProgressLog(tmp_path / "run", 0, ["cpu"]).close()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


def recorder(folder: Path, device: str = "cpu") -> RunRecorder:
    return RunRecorder(folder, TrainingRun("run", "test 1.0", "run", StepAccounting(9)), 0, [device])


@pytest.mark.parametrize("device", ["cpu", "cpu:1"], ids=["same device", "another device"])
def test_second_job_in_one_output_folder_is_warned_of_and_logged_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    first = recorder(tmp_path)
    second = recorder(tmp_path, device)
    assert second.folder == first.folder.with_name(f"{first.folder.name}-2")
    (warning,) = caplog.records
    assert f"process {os.getpid()}" in warning.getMessage()
    assert "two jobs save to one output folder" in warning.getMessage()
    second.end_step(1.0, steps_optimizer=True)
    second.close("failed", "no room")
    found = {run["id"]: run["state"] for run in status.of_folder(folder_of(tmp_path), USUAL)}
    assert found == {first.folder.name: "starting", second.folder.name: "failed"}
    first.close()
    third = recorder(tmp_path)
    third.close()
    assert third.folder == first.folder  # the next attempt, no job beside it
    assert len(caplog.records) == 1


def test_job_of_another_process_is_warned_of_and_stays_alive_when_the_second_dies(tmp_path: Path) -> None:
    first = record(tmp_path, 10_000_000, "lead")
    make_steps_until_logged(first, tmp_path)
    second = record(tmp_path, 10_000_000, "lead")
    make_steps_until_logged(second, tmp_path)
    second.kill()
    warning = second.communicate()[1]
    assert f"by process {first.pid} on " in warning
    try:
        make_steps(first, 1)
        found = {run["id"]: run["state"] for run in status.of_folder(folder_of(tmp_path), USUAL)}
        assert found[run_folder(tmp_path, "run").name] == "running"
        assert found[run_folder(tmp_path, "run").name + "-2"] == "gone"
    finally:
        first.kill()
        first.communicate()


def test_ranks_of_one_job_share_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = [ProgressLog(tmp_path / "run", rank, ["cpu"]) for rank in range(3)]
    assert {log.folder for log in logs} == {tmp_path / "run"}
    for log in logs:
        log.close()
    assert caplog.records == []


def test_log_that_cannot_be_opened_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / file_name(0, "cpu")).mkdir()
    with pytest.raises(WanshimError, match="is a directory"):
        ProgressLog(folder, 0, ["cpu"])
    (folder / file_name(0, "cpu")).rmdir()
    log = ProgressLog(folder, 0, ["cpu"])
    assert log.folder == folder
    log.close()


def test_removed_log_gives_way_to_a_job_that_has_made_the_folder_anew(tmp_path: Path) -> None:
    first = ProgressLog(tmp_path / "run", 0, ["cpu"])
    shutil.rmtree(tmp_path / "run")
    second = ProgressLog(tmp_path / "run", 0, ["cpu"])
    assert first.restore()
    assert first.folder == tmp_path / "run-2"
    assert not second.restore()
    third = ProgressLog(tmp_path / "run", 0, ["cpu"])
    assert third.folder == tmp_path / "run-3"
    for log in (first, second, third):
        log.close()


def test_log_that_another_host_removes_from_a_share_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ProgressLog(tmp_path / "run", 0, ["cpu"])
    (file,) = log._files.values()
    (tmp_path / "run" / file_name(0, "cpu")).unlink()
    fstat = os.fstat

    def stale(number: int) -> os.stat_result:
        if number == file:
            monkeypatch.setattr(os, "fstat", fstat)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(number)

    monkeypatch.setattr(os, "fstat", stale)
    assert log.restore()
    assert (tmp_path / "run" / file_name(0, "cpu")).exists()
    log.close()
