"""Which files a piece of code opens, counted by the kernel."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

_IN_OPEN, _IN_ISDIR, _IN_NONBLOCK = 0x20, 0x40000000, 0x800
_EVENT = struct.Struct("iIII")


class OpenCounter:
    """Names of the files below some folders that any process opened, as the kernel reports it (inotify)."""

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(_IN_NONBLOCK)
        for top in folders:
            for parent, _, _ in os.walk(top):
                if libc.inotify_add_watch(self._fd, os.fsencode(parent), _IN_OPEN) < 0:
                    raise OSError(ctypes.get_errno(), f"cannot watch {parent}")

    def close(self) -> None:
        os.close(self._fd)

    @property
    def opened(self) -> list[str]:
        """The files opened since the last look."""
        try:
            data = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return []
        names, position = [], 0
        while position < len(data):
            _, mask, _, length = _EVENT.unpack_from(data, position)
            position += _EVENT.size
            if not mask & _IN_ISDIR:
                names.append(data[position : position + length].rstrip(b"\0").decode())
            position += length
        return names


@pytest.fixture
def count_opens() -> Iterator[Callable[..., OpenCounter]]:
    """Starts to count the files that are opened below the given folders."""
    with ExitStack() as stack:

        def start(*folders: Path) -> OpenCounter:
            counter = OpenCounter(*folders)
            stack.callback(counter.close)
            return counter

        yield start
