"""Starts the command of `wanshim run`: once, or once for each rank on this machine; passes signals on, waits for its
end, and says what failed, and where wanshim was not.

Ranks find each other by the variables of torch's `env://`, as torchrun sets them. All processes end with this one,
however it ends.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wanshim import hand_over, settings
from wanshim.core.shared import processes
from wanshim.core.shared.files import remove_abandoned, temporary_folder
from wanshim.launch.interpreter_options import is_python, not_started, skipping_option
from wanshim.process_report import say

BOOT = Path(__file__).parent / "boot" / "path"
POLL_S = 0.1
GRACE_S = 30.0  # for ranks to end: torchrun's own grace
UNREACHED_S = 5.0  # a Python of a rank that runs for so long without wanshim is no helper of a wrapper
PORTS = (10_000, 29_000)  # Linux gives away those from 32768 on; torchrun takes 29500, Kubernetes those from 30000 on
SI_KERNEL = 0x80  # siginfo of a signal that the terminal sent, to all processes of its foreground group
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # a program may save its state at one, as Slurm sends it before the end
FOLDERS = "wanshim-run-"
# All ranks are on this machine: no other reaches their sockets. NCCL takes a name for a beginning but for the "=".
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
DROPPED = "In a script, write export PYTHONPATH=YOURS:$PYTHONPATH; sudo, ssh and containers drop the variable"
UNREACHED = f"no Python process of this command on this machine has said that wanshim is in it. {DROPPED}"


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
        if self.has_ended:
            return bool(self.process.poll())
        said = self.said
        if "refusal" in said or said.get("pid") == self.process.pid:
            return True
        # Behind a wrapper, which may go on where one of its programs has failed: not while that hangs in its end.
        is_late = bool(said) and time.time() - self.failure.stat().st_mtime > GRACE_S
        return is_late and processes.process_start(said["pid"]) is not None

    @property
    def said(self) -> dict[str, Any]:
        """The program's own record of its failure; empty if there is none."""
        try:
            found: dict[str, Any] = json.loads(self.failure.read_text())
        except FileNotFoundError:
            return {}
        return found

    @property
    def status(self) -> int:
        """The exit status as a shell counts it; of a rank that said what ended it and then hung, 1."""
        if "refusal" in self.said:
            return 2
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
        """The rank, the place and the cause, in one line."""
        if found := self.said:
            return found.get("refusal") or f"rank {self.number} failed at {found['place']}: {found['error']}"
        status = self.process.wait()
        if status >= 0:
            return f"rank {self.number} ended with exit status {status}; its own output is above"
        why = ": out of host memory, or killed by hand" if status == -signal.SIGKILL else ""
        return f"rank {self.number} was ended by {signal.Signals(-status).name}{why}"


def run(command: Sequence[str], count: int, environment: Mapping[str, str]) -> int:
    """Run `command` in `count` processes until all of them, or one that failed and then the others, have ended. The
    last rank is started first, and the others when wanshim is in it: a launcher numbers from 0, so the first process
    that it starts in there is no rank of this job, and ends.

    Args:
        command: the program, found on PATH, and its arguments.
        environment: of each process, beside what names its rank.

    Returns:
        0, or the exit status of the rank that failed first.
    """
    outer = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}
    shared = {**outer, **_meeting(count)}
    ranks: list[Rank] = []
    with _folder() as folder, _Signals() as signals:

        def start(numbers: Sequence[int]) -> None:
            for number in numbers:
                failure = folder / str(number)
                names = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(number))
                names |= {hand_over.RUN_FAILURE: str(failure), hand_over.RUN_RANK: f"{number}/{count}"}
                process = _start(command, {**shared, **names}, signals, stdin=_input_of(number), start_new_session=True)
                ranks.append(Rank(number, process, failure))

        try:
            start([count - 1])
            return _wait(ranks, signals, partial(start, range(count - 1)))
        finally:
            for rank in ranks:
                rank.send(signal.SIGKILL)


def run_alone(command: Sequence[str], environment: Mapping[str, str], *, watched: bool) -> int:
    """Run `command` once, in this terminal and this group of processes, until it has ended.

    Args:
        watched: say it where wanshim was in none of its processes.

    Returns:
        Its exit status. If a signal ended it, the same signal ends this process.
    """
    with _folder() as folder, _Signals(signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD) as signals:
        failure = folder / "0"
        variable = f"{hand_over.RUN_FAILURE}={failure}".encode()
        is_own = hand_over.run_rank() is None  # else the rank's launcher looks
        variables = {**environment, hand_over.RUN_FAILURE: str(failure)} if is_own else environment
        hand_over.leave_rank()
        # Files that the caller opened for the program stay open in it, as `<(...)` of a shell or the pipe of make.
        process = _start(command, variables, signals, close_fds=False)
        _release()
        sent = _wait_alone(process, signals)
        status = process.returncode
        if is_own and -status in sent:
            _wait_left(variable, sent[-status], signals)
        # A daemon may go on, and wanshim may still come into it; it may end meanwhile.
        goes_on = watched and is_own and processes.has_variable(variable)
        if watched and is_own and not goes_on and not hand_over.reached_file(failure).exists():
            say(UNREACHED)
    if status < 0:
        processes.end_by(-status)  # a shell ends its loop at ctrl-C by that alone
    return status if status >= 0 else 128 - status


def _start(
    command: Sequence[str], variables: Mapping[str, str], signals: _Signals, **options: Any
) -> subprocess.Popen[bytes]:
    end_with_launcher = processes.end_with(os.getpid())

    def prepare() -> None:
        end_with_launcher()
        signal.pthread_sigmask(signal.SIG_SETMASK, signals.mask)

    # In a session of its own a rank is signalled with all that it starts.
    try:
        return subprocess.Popen(command, env=variables, preexec_fn=prepare, **options)
    except OSError as error:
        raise not_started(shutil.which(command[0]) or command[0], error) from error


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for the files of the ranks. Those of launchers that were killed are removed."""
    parent = Path(tempfile.gettempdir())
    host, _, boot = processes.machine().partition("/")
    boot = boot.replace("-", "")
    # A share may keep the locks of another machine to that machine. One is known by its name, which a container has
    # anew each time, or by its boot; lengths are exact, since a machine's name may begin another's.
    digits, some = "[0-9a-f]", "[0-9a-f]" * 16
    for names in (f"{FOLDERS}{host}-{digits * 32}-{some}", f"{FOLDERS}*-{boot}-{some}"):
        for old in parent.glob(names):
            remove_abandoned(old)
    with temporary_folder(parent, f"{FOLDERS}{host}-{boot}-") as folder:
        folder.chmod(0o1733)  # for processes of another user, too; nobody else knows the name
        yield folder


def _release() -> None:
    """Close the standard streams but that of errors: whoever reads the program's output waits for its last writer, and
    its input is the program's."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in {0, 1} - {nothing}:  # the caller may have closed one of them
        os.dup2(nothing, number, inheritable=False)


@dataclass(frozen=True)
class _Sent:
    """A signal for the program, whether the terminal has sent it, and what the program had started by then."""

    number: int
    of_terminal: bool
    to: frozenset[int]


def _wait_alone(process: subprocess.Popen[bytes], signals: _Signals) -> dict[int, _Sent]:
    """Pass signals on until the process ends.

    Returns:
        The last of each number that may have ended it.
    """
    sent: dict[int, _Sent] = {}
    while process.poll() is None:
        found = signals.next(GRACE_S)
        if found is None:
            continue
        if found.si_signo == signal.SIGCHLD:
            _reap_orphans(process.pid)
            continue
        of_terminal = _is_of_terminal(found)
        if found.si_signo in (*ENDING, *PASSED_ON):
            started = frozenset(processes.descendants(process.pid))
            sent[found.si_signo] = _Sent(found.si_signo, of_terminal, started)
        if not of_terminal:
            process.send_signal(found.si_signo)
        _stop_if_asked(found)
    return sent


def _is_of_terminal(found: Any) -> bool:
    """Whether what the terminal sent has reached all of its foreground group, unlike the hang-up of a closed one: the
    kernel sends that to the leader of the session alone, with a SIGCONT."""
    alone = (signal.SIGHUP, signal.SIGCONT) if os.getsid(0) == os.getpid() else ()
    return found.si_code == SI_KERNEL and found.si_signo not in alone


def _stop_if_asked(found: Any) -> None:
    if found.si_signo == signal.SIGTSTP:  # was held back; the kernel drops it where no shell could resume us
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])


def _wait_left(variable: bytes, sent: _Sent, signals: _Signals) -> None:
    """A signal has ended the program: pass it on to what the program has left, and wait for its end. A shell and the
    launchers of accelerate and torch leave the training so, which may save its state first. Other signals are passed on
    meanwhile as to the program. A daemon goes on: it has left the session, and its parent, before.

    Args:
        variable: of the environment of what the program started.
        sent: the signal; one of the terminal has reached the foreground group already, and is for no other.
    """
    asked: set[int] = set()  # to end, by whatever signal
    told: set[int] = set()  # this one
    while True:
        parents = processes.parents()
        left = (processes.processes_of_session(os.getsid(0)).keys() | sent.to) & set(processes.with_variable(variable))
        left = {one for one in left if one in asked or _is_for(one, sent)}
        if not left:
            return
        first = {one for one in left if parents.get(one) not in left}  # what these have started is theirs to end
        if not sent.of_terminal:
            _send(first - told, sent.number)
        asked |= first
        told |= first
        found = signals.next(POLL_S)
        _reap_orphans(0)
        if found is None or found.si_signo == signal.SIGCHLD:
            continue
        if found.si_signo in (*ENDING, *PASSED_ON):
            sent, told = _Sent(found.si_signo, _is_of_terminal(found), sent.to), set()
        elif not _is_of_terminal(found):
            _send(first, found.si_signo)
        _stop_if_asked(found)


def _is_for(process: int, sent: _Sent) -> bool:
    """Whether a signal is for a process: it does not ignore it, and is in the foreground group if that alone has it."""
    try:
        is_elsewhere = sent.of_terminal and os.getpgid(process) != os.getpgid(0)
        return not is_elsewhere and not processes.ignores(process, sent.number)
    except ProcessLookupError:
        return False


def _send(to: Iterable[int], number: int) -> None:
    for one in to:
        with suppress(OSError):  # it has ended
            os.kill(one, number)


def _reap_orphans(program: int) -> None:
    """As the first process of a container this one inherits all whose parents have ended."""
    while os.getpid() == 1:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_pid == program:
            return
        os.waitpid(found.si_pid, 0)


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
    """Variables of torchrun that all ranks share."""
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": settings.foreign().get("OMP_NUM_THREADS") or str(max(1, cores // count)),
        **{name: settings.foreign().get(name) or value for name, value in LOOPBACK.items()},
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
    """Holds back the signals that ask this process to end, and those that are for the program, while it is entered."""

    def __init__(self, *more: int) -> None:
        both = (*ENDING, *PASSED_ON)
        self._numbers: list[int] = [one for one in both if signal.getsignal(one) is not signal.SIG_IGN]  # as of nohup
        self._numbers += more
        self.received: list[int] = []
        self.to_pass_on: list[int] = []

    def __enter__(self) -> _Signals:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        return self

    def __exit__(self, *error: object) -> None:
        while self.next(0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def next(self, seconds: float) -> Any:
        """The siginfo of the next signal within so many seconds, or None."""
        found = signal.sigtimedwait(self._numbers, seconds)
        # Behind a signal that interrupts the last moment of the wait, CPython returns memory that nothing has written.
        if found is not None and found.si_signo not in self._numbers:
            return None
        if found is not None:
            (self.to_pass_on if found.si_signo in PASSED_ON else self.received).append(found.si_signo)
        return found


def _wait(ranks: Sequence[Rank], signals: _Signals, start_others: Callable[[], None] | None = None) -> int:
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
            first, *others = {rank.process.poll() for rank in ranks}
            # as of one process: what all of them answer the signal with, such as 75 of a run that saved its state
            return 128 + asked if others or first is None or first < 0 else first
        if failed is not None:
            if "refusal" not in failed.said:
                _until(partial(_has_ended_or_was_asked, failed, signals), signals)  # its own end says more
            _end(ranks, signal.SIGTERM, signals)
            say(failed.describe_failure())
            return failed.status
        if start_others is not None:
            if hand_over.reached_file(ranks[0].failure).exists():
                start_others()
                start_others = None
            elif passed := "in no Python process of it" if ended else _passed_over(ranks[0].process.pid):
                _end(ranks, signal.SIGTERM, signals)
                say(f"--gpus had no effect, no other rank was started: wanshim was {passed} on this machine. {DROPPED}")
                return 2
        elif ended:
            return 0
        signals.next(POLL_S)


def _passed_over(session: int) -> str:
    """A Python of this session that runs without wanshim, in words; "" if there is none yet. A tool that starts
    another program is none."""
    found = processes.processes_of_session(session)
    for number in found.keys() - found.values():
        with suppress(OSError):
            if (
                not is_python(str(Path(f"/proc/{number}/exe").readlink()))
                or processes.process_age(number) < UNREACHED_S
            ):
                continue
            words = Path(f"/proc/{number}/cmdline").read_text(errors="replace").split("\0")
            inherited = Path(f"/proc/{number}/environ").read_text(errors="replace")
            if skipping_option(words[1:]) or str(BOOT) not in inherited:
                return f"not in the Python process {' '.join(words).strip()}"
    return ""


def _has_ended_or_was_asked(rank: Rank, signals: _Signals) -> bool:
    return rank.has_ended or bool(signals.received)


def _end(ranks: Sequence[Rank], number: int, signals: _Signals) -> None:
    """End all ranks with the signal, and those that stay with SIGKILL; at once if this process is asked again."""
    before = len(signals.received)
    for rank in ranks:
        rank.send(number, signal.SIGCONT)
    _until(lambda: all(rank.has_ended for rank in ranks) or len(signals.received) > before, signals)
    for rank in ranks:
        rank.send(signal.SIGKILL)


def _until(done: Callable[[], bool], signals: _Signals) -> None:
    """Wait for it, at most GRACE_S."""
    end = time.monotonic() + GRACE_S
    while not done() and time.monotonic() < end:
        signals.next(POLL_S)
