"""A worker's process, seen from the one that starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from wanshim.core.shared import gpus

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
_VISIBLE = "CUDA_VISIBLE_DEVICES"


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

    It sees the same GPUs, but its own by the number that this process's own has here: a device in an attribute of a
    model is then its own, and kernels that a compiler has chosen for the one are found on disk by the other.

    Args:
        file: descriptor of the file of its store, which the process inherits.
        own: number of this process's GPU.
        other: number of the worker's here, if it is the one that it will get.
    """

    device: torch.device | None = None

    def __init__(self, file: int, own: int = 0, other: int = 0) -> None:
        self.file = file
        visible = None if own == other else gpus.exchanged(visible_devices(), own, other)
        self._variables = {} if visible is None else {_VISIBLE: visible}
        self._numbers = {} if visible is None else {own: other, other: own}
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), *sys.path]
            self.process = _start_process(command, (theirs.fileno(), file), self._environment())
        self.link = Link(ours)

    @property
    def device_there(self) -> str:
        """Its device as the worker numbers it."""
        assert self.device is not None, "it is assigned"
        index = self.device.index
        return str(self.device) if index not in self._numbers else f"{self.device.type}:{self._numbers[index]}"

    def _environment(self) -> dict[str, str]:
        return dict(os.environ) | self._variables  # noqa: TID251 - passed on as it is

    def assign(self, device: torch.device, patience: float) -> None:
        """Set what it is for, and the limit on its silence in seconds."""
        self.device = device
        self.link.limit_silence(patience)

    def load(self, prepare: str, imports: tuple[str, ...]) -> None:
        """Have it call `prepare` and import, with this process's variables. It replies only where that fails."""
        self.link.send(("load", self._environment(), prepare, imports))

    def __str__(self) -> str:
        there = "" if self.device is None or self.device_there == str(self.device) else f", {self.device_there} there"
        return f"the worker on {self.device} (process {self.process.pid}{there})"

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


def visible_devices() -> str | None:
    """The variable that says which GPUs a new process sees."""
    return os.environ.get(_VISIBLE)  # noqa: TID251 - passed on, with two exchanged


def _start_process(
    command: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that Linux ends with this one.

    Linux ends it with the thread that started it, which here waits for it and so lives as long as either of them.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def start_and_wait() -> None:
        try:
            process = subprocess.Popen(
                command,
                pass_fds=descriptors,
                env=environment,
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
