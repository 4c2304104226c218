"""Which machine and which process this is, and whether another process of this machine still runs."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

_STOPPED, _ENDED = "tT", "ZXx"  # states in /proc
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
    return "" if found is None else f"{_namespace()}/{os.getpid()}/{found[1]}"


def process_state(name: str) -> str:
    """What the process that `process()` names so does: "runs", "stopped", "ended", or "unknown" on another machine.

    The kernel knows, also while the process's interpreter is held.
    """
    *namespace, number, start = name.split("/") if name else ["", "", ""]
    if "/".join(namespace) != _namespace():
        return "unknown"
    found = _stat(int(number))
    if found is None or found[1] != start or found[0] in _ENDED:
        return "ended"
    return "stopped" if found[0] in _STOPPED else "runs"


def process_start(number: int) -> int | None:
    """The kernel's start time of a process in clock ticks, which distinguishes a pid from its reuse; None if gone."""
    found = _stat(number)
    return None if found is None or found[0] in _ENDED else int(found[1])


@cache
def _namespace() -> str:
    try:
        return f"{_boot_id()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "none"


def _stat(number: int) -> tuple[str, str] | None:
    """State and start time of a process."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]
