"""The addresses on which processes listen, as the kernel has them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LOOPBACK = "0100007F"  # 127.0.0.1, in hexadecimal as the kernel prints it


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses of these processes, in hexadecimal."""
    inodes = set()
    for pid in pids:
        with suppress(FileNotFoundError):  # the process, or the file, is gone
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    inodes.add(os.readlink(file))  # noqa: PTH115
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


def descendants(pid: int) -> list[int]:
    """A process and all that it and they have started."""
    found = [pid]
    for parent in found:
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, file.read_text().split())
    return found
