"""Starts one process for each rank on this machine, and ends with one line that names the rank that failed and why.

The ranks find each other by the variables of torch's `env://`, as torchrun sets them. They end with this process,
however it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from wanshim import settings
from wanshim.launch.interpreter_options import not_started, program_at
from wanshim.process_report import say

POLL_S = 0.1
GRACE_S = 30.0  # for ranks to end: torchrun's own grace
PORTS = (10_000, 29_000)  # Linux gives away those from 32768 on; torchrun takes 29500, Kubernetes those from 30000 on
PR_SET_PDEATHSIG = 1  # prctl(2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # a program may save its state at one, as Slurm sends it before the end


@dataclass
class Rank:
    """One started process, and the file in which it says what ended it."""

    number: int
    process: subprocess.Popen[bytes]
    failure: Path

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def has_failed(self) -> bool:
        return bool(self.process.poll()) or (not self.has_ended and self.failure.exists())

    @property
    def status(self) -> int:
        """The exit status as a shell counts it; of a rank that said what ended it and then hung, 1."""
        status: int = self.process.wait()
        return status if status >= 0 else 1 if self.failure.exists() else 128 - status

    @property
    def failed_at(self) -> tuple[bool, float]:
        """For the order of failures: a rank that was killed is no consequence of another's error."""
        killed = (self.process.poll() or 0) < 0
        return not killed, self.failure.stat().st_mtime if self.failure.exists() else float("inf")

    def send(self, *signals: int) -> None:
        """To the process and all that it started."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                for one in signals:
                    os.killpg(self.process.pid, one)

    def say_if_stopped(self) -> None:
        try:
            change = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            return  # it has ended
        if change is not None and change.si_code == os.CLD_STOPPED:
            pid, name = self.process.pid, signal.Signals(change.si_status).name
            say(f"rank {self.number} was stopped by {name}, and the others wait for it: kill -CONT {pid} resumes it")
        elif change is not None and change.si_code == os.CLD_CONTINUED:
            say(f"rank {self.number} goes on")

    def describe_failure(self) -> str:
        """Who, where and why, in one line."""
        if self.failure.exists():
            found = json.loads(self.failure.read_text())
            return f"rank {self.number} failed at {found['place']}: {found['error']}"
        status = self.process.wait()
        if status >= 0:
            return f"rank {self.number} ended with exit status {status}; its own output is above"
        why = ": out of host memory, or killed by hand" if status == -signal.SIGKILL else ""
        return f"rank {self.number} was ended by {signal.Signals(-status).name}{why}"


def run(command: Sequence[str], count: int, environment: Mapping[str, str]) -> int:
    """Run `command` in `count` processes until all of them, or one that failed and then the others, have ended.

    Args:
        command: the program, found on PATH, and its arguments.
        environment: of each process, beside what names its rank.

    Returns:
        0, or the exit status of the rank that failed first.
    """
    outer = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}
    shared = {**outer, **_meeting(count), settings.RUN_LAUNCHER: str(os.getpid())}
    if program_at(command):
        shared[settings.RUN_WRAPPED] = "1"
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="wanshim-run-") as folder, _Signals() as signals:
        try:
            for number in range(count):
                failure = Path(folder, str(number))
                names = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(number))
                variables = {**shared, **names, settings.RUN_FAILURE: str(failure)}
                ranks.append(Rank(number, _start(command, variables, _input_of(number)), failure))
            return _wait(ranks, signals)
        finally:
            for rank in ranks:
                rank.send(signal.SIGKILL)


def _start(command: Sequence[str], variables: Mapping[str, str], stdin: int | None) -> subprocess.Popen[bytes]:
    launcher, libc = os.getpid(), ctypes.CDLL(None)

    def end_with_launcher() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)

    # In a session of its own a rank is signalled with all that it starts.
    try:
        return subprocess.Popen(
            command, env=variables, stdin=stdin, start_new_session=True, preexec_fn=end_with_launcher
        )
    except OSError as error:
        raise not_started(shutil.which(command[0]) or command[0], error) from error


def _input_of(number: int) -> int | None:
    """Standard input of a rank: a file is read by each from where it stands; a terminal or a pipe, whose rest may be
    for the program after this one, is rank 0's alone."""
    try:
        if stat.S_ISREG(os.fstat(0).st_mode):
            file = os.open("/proc/self/fd/0", os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(file, os.lseek(0, 0, os.SEEK_CUR), os.SEEK_SET)
            return file
    except OSError:
        return subprocess.DEVNULL  # closed by the caller
    return None if number == 0 else subprocess.DEVNULL


def _meeting(count: int) -> dict[str, str]:
    """What all ranks share of the variables that torchrun sets."""
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": settings.foreign().get("OMP_NUM_THREADS") or str(max(1, cores // count)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GROUP_RANK": "0",
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(count)),
    }


def free_port() -> int:
    """A port that rank 0 can bind, however late: below those that the kernel gives to programs which name none."""
    for port in (*random.SystemRandom().sample(range(*PORTS), 30), 0):
        with socket.socket() as server, suppress(OSError):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen(1)  # fails where another listens; with SO_REUSEADDR, two may bind
            found: int = server.getsockname()[1]
            return found
    raise OSError("no port of this machine can be bound")


class _Signals:
    """Notes the signals that ask this process to end, and those that are for the program, while it is entered."""

    def __enter__(self) -> _Signals:
        self.received: list[int] = []
        self.to_pass_on: list[int] = []
        all_of_them = (*ENDING, *PASSED_ON)
        heeded = [one for one in all_of_them if signal.getsignal(one) is not signal.SIG_IGN]  # nohup ignores SIGHUP
        self._before = {one: signal.signal(one, self._note) for one in heeded}
        return self

    def _note(self, number: int, frame: object) -> None:
        (self.to_pass_on if number in PASSED_ON else self.received).append(number)

    def __exit__(self, *error: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)


def _wait(ranks: Sequence[Rank], signals: _Signals) -> int:
    while True:
        while signals.to_pass_on:
            number = signals.to_pass_on.pop(0)
            for rank in ranks:
                rank.process.send_signal(number)  # not to its children: they seldom expect it, and it would end them
        for rank in ranks:
            rank.say_if_stopped()
        ended = all(rank.has_ended for rank in ranks)  # before failures are looked for: the last may come in between
        failed = min((rank for rank in ranks if rank.has_failed), key=lambda rank: rank.failed_at, default=None)
        if signals.received:
            asked = signal.Signals(signals.received[0])
            _end(ranks, asked, signals)
            say(f"ended by {asked.name}, with all ranks")
            return 128 + asked
        if failed is not None:
            _until(partial(_has_ended_or_was_asked, failed, signals))  # its own end says more
            _end(ranks, signal.SIGTERM, signals)
            say(failed.describe_failure())
            return failed.status
        if ended:
            _say_if_unreached(ranks)
            return 0
        time.sleep(POLL_S)


def _say_if_unreached(ranks: Sequence[Rank]) -> None:
    """What is behind a wrapper that drops variables, as sudo, or is of another Python, does not know of the others."""
    for rank in ranks:
        if not settings.reached_file(rank.failure).exists():
            say(f"--gpus had no effect on rank {rank.number}: wanshim was in no Python process of it")


def _has_ended_or_was_asked(rank: Rank, signals: _Signals) -> bool:
    return rank.has_ended or bool(signals.received)


def _end(ranks: Sequence[Rank], number: int, signals: _Signals) -> None:
    """End all ranks with the signal, and those that stay with SIGKILL; at once if this process is asked again."""
    before = len(signals.received)
    for rank in ranks:
        rank.send(number, signal.SIGCONT)
    _until(lambda: all(rank.has_ended for rank in ranks) or len(signals.received) > before)
    for rank in ranks:
        rank.send(signal.SIGKILL)


def _until(done: Callable[[], bool]) -> None:
    """Wait for it, at most GRACE_S."""
    end = time.monotonic() + GRACE_S
    while not done() and time.monotonic() < end:
        time.sleep(POLL_S)
