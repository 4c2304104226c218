"""The launcher of ranks: what it starts, the status and the sentence of its end, and signals on their way. Small
programs stand for a training; those of users are in tests/contract/test_run.py and tests/roads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import IO, Any

import pytest

from wanshim.core.shared import processes
from wanshim.core.shared.files import Lock
from wanshim.errors import WanshimError
from wanshim.launch import ranks, start

ROOT = Path(__file__).parents[2]
BOUND_S = 60.0  # for a machine under load
# Written at once, under its name only when it is whole.
PROGRAM = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with open("pids.part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(ready: Callable[[], bool]) -> bool:
    end = time.monotonic() + BOUND_S
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)
    return ready()


class Launched:
    """The status with which the launcher ended, and what it and the ranks wrote on standard error."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd
        self.status, self.said = -1, ""

    def run(self, program: str, count: int = 2) -> Launched:
        file = self.folder / "train.py"
        file.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + dedent(program))
        self.status = ranks.run([sys.executable, str(file)], count, start.environment("none", gpus=count))
        self.said = " ".join(self._capfd.readouterr().err.split())
        return self

    def has(self, *names: str) -> bool:
        return all((self.folder / name).exists() for name in names)


def test_folder_of_a_machine_whose_locks_are_not_seen_here_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(lock: Lock) -> bool:  # to each machine, as on a share that is mounted with local locks
        lock.is_held = True
        return True

    monkeypatch.setattr(Lock, "take", free)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(processes, "machine", lambda: f"gpu-2/{uuid.UUID(int=2)}")
    with ranks._folder() as folder:
        monkeypatch.setattr(processes, "machine", lambda: f"gpu/{uuid.UUID(int=1)}")
        with ranks._folder():
            assert folder.exists()
        monkeypatch.setattr(processes, "machine", lambda: f"container/{uuid.UUID(int=2)}")  # sees its locks
        with ranks._folder():
            assert not folder.exists()


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Launched:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Launched(tmp_path, capfd)


@pytest.fixture
def pids(launched: Launched) -> Iterator[Path]:
    yield launched.folder / "pids"
    for pid in map(int, (launched.folder / "pids").read_text().split()):
        if is_running(pid):
            os.kill(pid, 9)


def test_each_rank_has_its_number_and_all_of_them_one_meeting(launched: Launched) -> None:
    launched.run(
        """
        import json
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
        open(f"{rank}.json", "w").write(json.dumps([os.environ[name] for name in names]))
        """,
        count=3,
    )
    found = [json.loads((launched.folder / f"{rank}.json").read_text()) for rank in range(3)]
    assert launched.status == 0
    assert [each[:5] for each in found] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len({each[5] for each in found}) == 1


def test_a_signal_that_nobody_waits_for_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 returns a number that nothing has written where another signal interrupts the last moment of a wait.
    A double of that moment."""
    monkeypatch.setattr(signal, "sigtimedwait", lambda *_: SimpleNamespace(si_signo=-1379911232))
    with ranks._Signals() as signals:
        assert signals.next(0) is None
        assert not signals.received
        assert not signals.to_pass_on


@pytest.mark.parametrize(
    ("ends", "status", "sentence"),
    [
        ("sys.exit(7)", 7, "rank 1 ended with exit status 7; its own output is above"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by SIGKILL: out of host memory, or killed by hand"),
        ("os.kill(os.getpid(), 15)", 143, "rank 1 was ended by SIGTERM"),
    ],
)
def test_status_and_sentence_are_of_the_rank_that_failed(
    launched: Launched, ends: str, status: int, sentence: str
) -> None:
    launched.run(f"if rank == 1:\n    {ends}\ntime.sleep(600)")
    assert launched.status == status
    assert launched.said.endswith(f"wanshim: {sentence}")


def test_a_rank_that_was_killed_comes_before_another_s_error(tmp_path: Path) -> None:
    """The error may be a consequence, a kill is none."""
    ended = [subprocess.Popen(["/bin/sh", "-c", command]) for command in ("exit 1", "kill -9 $$", "exit 2")]
    assert [process.wait() for process in ended] == [1, -signal.SIGKILL, 2]
    found = [ranks.Rank(number, process, tmp_path / str(number)) for number, process in enumerate(ended)]
    found[0].failure.write_text("{}")
    assert all(rank.has_failed for rank in found)
    assert [rank.number for rank in sorted(found, key=lambda rank: rank.failed_at)] == [1, 0, 2]
    assert [rank.status for rank in found] == [1, 137, 2]


def test_a_rank_that_hangs_in_its_end_is_ended_with_the_status_of_its_error(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    began = time.monotonic()
    launched.run(
        """
        import threading
        threading.Thread(target=time.sleep, args=(600,)).start()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            raise ValueError("no clip")
        """
    )
    assert launched.status == 1
    assert "ValueError: no clip" in launched.said
    assert time.monotonic() - began < BOUND_S


def test_a_stopped_rank_is_named_and_so_is_that_it_goes_on(launched: Launched) -> None:
    def stop_and_resume() -> None:
        until(lambda: launched.has("0", "1"))
        pid = int((launched.folder / "1").read_text())
        os.kill(pid, signal.SIGSTOP)
        time.sleep(4 * ranks.POLL_S)
        os.kill(pid, signal.SIGCONT)
        time.sleep(4 * ranks.POLL_S)
        (launched.folder / "done").touch()

    other = threading.Thread(target=stop_and_resume)
    other.start()
    launched.run(
        """
        open(f"part{rank}", "w").write(str(os.getpid()))
        os.rename(f"part{rank}", str(rank))
        while not os.path.exists("done"):
            time.sleep(0.02)
        """
    )
    other.join()
    assert launched.status == 0
    stopped, resumed = "rank 1 was stopped by SIGSTOP, and the others wait for it", "rank 1 goes on"
    assert launched.said.index(stopped) < launched.said.index(resumed)


@pytest.mark.parametrize(("answers", "status"), [("75", 75), ("[75, 3][rank]", 128 + signal.SIGTERM)])
def test_status_after_a_signal_is_that_which_all_ranks_answer_it_with(
    launched: Launched, answers: str, status: int
) -> None:
    """A run that has saved its state asks so to be started again."""

    def end() -> None:
        until(lambda: launched.has("0", "1"))
        os.kill(os.getpid(), signal.SIGTERM)

    other = threading.Thread(target=end)
    other.start()
    launched.run(
        f"""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit({answers}))
        open(str(rank), "w").close()
        while True:
            time.sleep(0.02)
        """
    )
    other.join()
    assert launched.status == status


@pytest.mark.parametrize("ignored", [False, True])
def test_a_hang_up_ends_the_ranks_unless_the_launcher_s_caller_ignores_it(launched: Launched, ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    def hang_up() -> None:
        until(lambda: launched.has("0", "1"))
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(4 * ranks.POLL_S)
        (launched.folder / "done").touch()

    other = threading.Thread(target=hang_up)
    other.start()
    try:
        launched.run(
            """
            open(str(rank), "w").close()
            while not os.path.exists("done") or os.getppid() == 1:
                time.sleep(0.02)
            """
        )
    finally:
        other.join()
        signal.signal(signal.SIGHUP, before)
    assert launched.status == (0 if ignored else 128 + signal.SIGHUP)
    assert ("ended by SIGHUP, with all ranks" in launched.said) is not ignored


def test_a_command_in_which_wanshim_is_not_starts_no_other_rank(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks.run(["/bin/sh", "-c", "echo once >> count"], 2, start.environment("none", gpus=2)) == 2
    assert (launched.folder / "count").read_text() == "once\n"
    monkeypatch.setattr(ranks, "UNREACHED_S", 0.2)
    program = "import time; open('isolated', 'w').close(); time.sleep(600)"
    assert ranks.run(["/bin/sh", "-c", f'{sys.executable} -I -c "{program}"; true'], 2, os.environ) == 2
    assert (launched.folder / "isolated").exists()


def test_ranks_and_their_children_are_gone_if_a_later_rank_cannot_be_started(
    pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pids.parent / "train.py").write_text(PROGRAM)
    begin, started = ranks._start, list[Any]()

    def second_fails(*args: Any, **kwargs: Any) -> Any:
        if started:
            assert until(pids.exists)
            raise OSError(12, "Cannot allocate memory")
        started.append(begin(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(ranks, "_start", second_fails)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        ranks.run([sys.executable, "train.py"], 2, start.environment("none", gpus=2))
    rank, child = map(int, pids.read_text().split())
    assert until(lambda: not is_running(rank))
    assert until(lambda: not is_running(child))


@pytest.mark.parametrize(("count", "threads"), [(1, len(os.sched_getaffinity(0))), (10_000, 1)])
def test_threads_of_a_rank_are_its_share_of_the_cores(
    count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks._meeting(count)["OMP_NUM_THREADS"] == str(threads)


def test_a_program_that_cannot_be_executed_is_named(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    program = launched.folder / "train"
    program.write_text("#!/no/such/program\n")
    program.chmod(0o755)
    with pytest.raises(WanshimError, match=r"train cannot be executed: its first line '#!/no/such/program' names"):
        ranks.run([str(program)], 2, start.environment("none", gpus=2))
    program.write_text("true\n")
    monkeypatch.setenv("PATH", str(launched.folder))
    with pytest.raises(WanshimError, match=f"{program} cannot be executed: Exec format error"):
        ranks.run(["train"], 2, start.environment("none", gpus=2))


ALONE = """
import os, sys
from wanshim.launch import ranks, start
watched, *command = sys.argv[1:]
status = ranks.run_alone(command, start.environment("none"), watched=watched == "watched")
print("nothing of this is read", flush=True)
sys.stderr.write(f"stdin {os.read(0, 9)}\\n")
sys.exit(status)
"""


def alone(watched: bool, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ALONE, "watched" if watched else "", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="for the program",
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


@pytest.mark.parametrize("watched", [True, False])
def test_one_process_has_the_standard_streams_for_itself_and_its_status(watched: bool) -> None:
    done = alone(watched, "/bin/sh", "-c", "cat; exit 5")
    assert (done.returncode, done.stdout) == (5, "for the program")
    assert "stdin b''" in done.stderr
    assert ("no Python process of this command" in done.stderr) is watched


def test_one_process_that_wanshim_is_in_is_not_said_to_be_missed() -> None:
    done = alone(True, sys.executable, "-c", "print('here')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "here\n", "stdin b''\n")


def test_the_launcher_of_one_process_ends_by_the_signal_that_ended_it() -> None:
    assert alone(False, "/bin/sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def launcher_of(program: str, **options: Any) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """`run_alone` of a shell's program that has printed "ready", and the output of both."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", ALONE, "", "/bin/sh", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **options,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"ready\n"
    return launcher, launcher.stdout


def test_a_signal_reaches_the_one_process() -> None:
    program = "trap 'exit 9' USR1; echo ready; while :; do sleep 0.05; done"
    launcher, output = launcher_of(program)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(BOUND_S) == 9
    output.close()


LEFT = """
{} sh -c 'trap "sleep 0.5; echo saved; exit" TERM USR1; sleep 60 & echo ready; while :; do sleep 0.05; done' &
wait
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("session", ["", "setsid"])  # torch's launcher gives each process a session of its own
def test_what_a_program_leaves_that_a_signal_ends_has_the_signal_too_and_is_waited_for(
    number: signal.Signals, session: str
) -> None:
    """As accelerate's launcher and a shell leave the training, which saves its state before it ends."""
    launcher, output = launcher_of(LEFT.format(session), start_new_session=True)
    launcher.send_signal(number)
    assert launcher.wait(BOUND_S) == -number
    assert not any(map(is_running, processes.processes_of_session(launcher.pid)))
    assert output.read() == b"saved\n"
    output.close()


LEAVING = """
trap '' HUP
for one in TERM USR1; do trap "echo ends; sleep 0.3; trap - $one; kill -$one $$" $one; done
sh -c 'trap "echo saves; until test -e saved; do sleep 0.05; done; exit" TERM USR1
    sleep 600 & echo ready; while :; do sleep 0.05; done' &
wait
"""


@pytest.fixture(params=[signal.SIGTERM, signal.SIGUSR1])
def leaving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`run_alone` of a program that ends by a signal, and leaves one that saves its state then."""
    # a shell, which this is to it, has a group for each job
    launcher, output = launcher_of(LEAVING, cwd=tmp_path, preexec_fn=os.setpgrp)
    launcher.send_signal(request.param)
    assert output.readline() == b"ends\n"
    try:
        yield launcher
        (tmp_path / "saved").touch()
        assert launcher.wait(BOUND_S) == -request.param
        assert not any(map(is_running, members(launcher.pid)))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        output.close()


def members(group: int) -> list[int]:
    found = []
    for one in processes.processes_of_session(os.getsid(0)):
        with suppress(ProcessLookupError):
            found += [one] * (os.getpgid(one) == group)
    return found


@pytest.mark.parametrize("more", [(), (signal.SIGHUP,)])
def test_training_that_is_left_is_waited_for_whatever_other_signals_came(
    leaving: subprocess.Popen[bytes], more: tuple[int, ...]
) -> None:
    for number in more:
        leaving.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        leaving.wait(1.0)
    assert leaving.stdout is not None
    assert leaving.stdout.readline() == b"saves\n"


def test_a_launcher_that_waits_for_what_a_program_left_stops_and_goes_on(leaving: subprocess.Popen[bytes]) -> None:
    """Else ctrl-Z would stop what it waits for, and give no shell the terminal back."""
    assert leaving.stdout is not None
    assert leaving.stdout.readline() == b"saves\n"

    def state() -> str:
        return Path(f"/proc/{leaving.pid}/stat").read_text().rpartition(")")[2].split()[0]

    os.killpg(leaving.pid, signal.SIGTSTP)
    try:
        assert until(lambda: state() == "T")
    finally:
        os.killpg(leaving.pid, signal.SIGCONT)


def test_what_a_signal_of_the_terminal_is_not_for_is_not_waited_for() -> None:
    """It is for the foreground group: a program's helpers in another go on."""
    helper = subprocess.Popen(["sleep", "600"], env={"WANSHIM_TEST_LEFT": "1"}, preexec_fn=os.setpgrp)
    until(lambda: helper.pid in processes.with_variable(b"WANSHIM_TEST_LEFT=1"))
    late = threading.Timer(10.0, helper.kill)
    late.start()
    with ranks._Signals() as signals:
        sent = ranks._Sent(signal.SIGINT, True, frozenset({helper.pid}))
        ranks._wait_left(b"WANSHIM_TEST_LEFT=1", sent, signals)
    assert helper.poll() is None
    late.cancel()
    helper.kill()
    helper.wait()
