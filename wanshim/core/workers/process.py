"""A worker's process, seen from the one that starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from .link import Link

if TYPE_CHECKING:
    import torch

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from wanshim.core.shared.processes import end_with; end_with(int(sys.argv[2]))(); "
    "from wanshim.core.workers.server import main; main(int(sys.argv[1]))"
)
_IS_WORKER = False
_STANDARD_ERROR = 2


def is_worker() -> bool:
    """Whether this process is a worker of another."""
    return _IS_WORKER


def become_worker() -> None:
    """From now on it is one."""
    global _IS_WORKER
    _IS_WORKER = True


def occupy_standard_descriptors() -> None:
    """A program may have closed them: what is opened next would have their numbers, and get whatever is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)


class Worker:
    """One process, and this process's end of its link.

    Args:
        file: descriptor of the file of its store, which the process inherits.
    """

    device: torch.device | None = None

    def __init__(self, file: int) -> None:
        self.file = file
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), *sys.path]
            self.process = _start_process(command, (theirs.fileno(), file))
        self.link = Link(ours)

    def assign(self, device: torch.device, patience: float) -> None:
        """Set what it is for, and the limit on its silence in seconds."""
        self.device = device
        self.link.limit_silence(patience)

    def load(self, prepare: str, imports: tuple[str, ...]) -> None:
        """Have it call `prepare` and import, with this process's variables. It replies only where that fails."""
        environment = dict(os.environ)  # noqa: TID251 - passed on as it is
        self.link.send(("load", environment, prepare, imports))

    def __str__(self) -> str:
        return f"the worker on {self.device} (process {self.process.pid})"

    def how_it_ended(self, within: float = 1.0) -> str:
        """In words, after so many seconds at most; empty while it runs."""
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            return ""
        if code >= 0:
            return f"ended with status {code}"
        hint = ", which the system sends when host memory runs out" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def end(self) -> None:
        self.process.kill()  # it holds copies alone; a stopped one ends too
        self.link.close()
        self.process.wait()


def _start_process(command: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process that Linux ends with this one.

    Linux ends it with the thread that started it, which here waits for it and so lives as long as either of them.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def start_and_wait() -> None:
        try:
            process = subprocess.Popen(
                command,
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR,  # what the copy prints is no output of the user's program
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    threading.Thread(target=start_and_wait, name="wanshim-worker", daemon=True).start()
    return started.result()
