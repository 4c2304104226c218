"""Names of this machine and of processes on it, their state, their start, and their end with the process above them.

The kernel's own files are read, not psutil: its start time of a process moves with the machine's clock, it takes longer
to import than the rest of a rank's start, and frameworks without accelerate do not bring it. Importing this module
imports no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_PARENT, _SESSION, _START = 1, 3, 19  # fields of /proc/PID/stat behind the name
_STOPPED, _ENDED = "tT", "ZXx"  # states in /proc
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4  # prctl(2)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """`host/boot`: the same for the processes that share this host's memory and clock, and for no others.

    A host name alone does not say it: machines of one image share it, and a reboot keeps it. Containers of one
    host share the boot. On a system without a boot id the second part is empty.
    """
    return f"{socket.gethostname()}/{_boot_id()}"


@cache
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process() -> str:
    """Names this process for the others of its machine and process namespace; empty on a system without /proc."""
    found = _stat(os.getpid())
    return "" if found is None else f"{namespace()}/{os.getpid()}/{found[_START]}"


def process_state(name: str) -> str:
    """The state of the process that `process()` names so: "runs", "stopped", "ended", or "unknown" on another machine.

    The kernel knows, also while the process's interpreter is held.
    """
    *where, number, start = name.split("/") if name else ["", "", ""]
    if "/".join(where) != namespace():
        return "unknown"
    found = _stat(int(number))
    if found is None or found[_START] != start or found[0] in _ENDED:
        return "ended"
    return "stopped" if found[0] in _STOPPED else "runs"


def process_start(number: int) -> int | None:
    """The kernel's start time of a process in clock ticks, which distinguishes a pid from its reuse; None if gone."""
    found = _stat(number)
    return None if found is None or found[0] in _ENDED else int(found[_START])


def process_age(number: int) -> float:
    """Seconds since the start of a process; 0 if it is gone."""
    ticks = process_start(number)
    up = float(Path("/proc/uptime").read_text().split()[0])
    return 0.0 if ticks is None else up - ticks / os.sysconf("SC_CLK_TCK")


def ignores(number: int, signal_number: int) -> bool:
    """Whether a process ignores a signal."""
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{number}/status").read_text().splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def processes_of_session(session: int) -> dict[int, int]:
    """The processes of a session, each with its parent."""
    found = ((number, _stat(number)) for number in _numbers())
    return {number: int(stat[_PARENT]) for number, stat in found if stat and int(stat[_SESSION]) == session}


def parents() -> dict[int, int]:
    """The parent of each process that this one can see."""
    return {number: int(stat[_PARENT]) for number in _numbers() if (stat := _stat(number)) is not None}


def descendants(number: int) -> set[int]:
    """The processes that one has started, and those that these have."""
    above, found, last = parents(), set[int](), {number}
    while last := {one for one, parent in above.items() if parent in last}:
        found |= last
    return found


def has_variable(variable: bytes) -> bool:
    """Whether a process that this user may look at has `NAME=value` in its environment."""
    return next(with_variable(variable), None) is not None


def with_variable(variable: bytes) -> Iterator[int]:
    """The processes that this user may look at and that have `NAME=value` in their environment."""
    for number in _numbers():
        with suppress(OSError):  # it has ended, or is another user's
            if variable in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
                yield number


def end_with(parent: int) -> Callable[[], None]:
    """A function for a child of `parent`: from its call on Linux ends the child with the thread that started it.

    It allocates nothing, and may be called between fork and exec.
    """
    prctl = _libc().prctl

    def call() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return call


def end_by(number: int) -> None:
    """End this process by a signal that ended its program, for whoever waits for it; the core is the program's."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    _libc().prctl(_PR_SET_DUMPABLE, 0)
    with suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _libc() -> Any:
    import ctypes  # needed by few: not in every rank

    return ctypes.CDLL(None)


@cache
def namespace() -> str:
    """`boot/namespace`: the same for the processes among which a number names one process. Containers have each their
    own, whatever their host name."""
    try:
        return f"{_boot_id()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "none"


def _numbers() -> Iterator[int]:
    return (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def _stat(number: int) -> list[str] | None:
    """The fields of a process behind its name, of which its state is the first."""
    try:
        return Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
