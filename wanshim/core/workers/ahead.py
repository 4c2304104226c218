"""Workers that start before anybody knows what for, and import while the program loads its models.

They have no device, and so no CUDA context, until the first `Workers` of this process that begins takes them.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

from wanshim.core.shared.forks import Owner

from .link import LinkLost
from .mover import file_of_a_store
from .process import Worker, occupy_standard_descriptors, visible_devices


class _Ahead:
    """Those of this process. One instance, `AHEAD`."""

    def __init__(self) -> None:
        self._owner = Owner("workers that wait")
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._found_by: tuple[Any, ...] | None = None
        atexit.register(self.end)

    def start(self, count: int, imports: tuple[str, ...]) -> None:
        """Start so many, which import these modules and wait. If one cannot be started, the first call says why."""
        with self._lock, contextlib.suppress(OSError, RuntimeError, LinkLost):
            occupy_standard_descriptors()
            self._found_by, file = _what_finds(), file_of_a_store()
            for number in range(1, 1 + count):  # of the GPUs that a program uses which names none
                self._workers.append(Worker(file, other=number))
                self._workers[-1].load("", imports)

    def take(self, count: int) -> list[Worker]:
        """Those that there are of so many; they share a file. The others end, and so do all if a new process would
        find modules elsewhere by now, or other GPUs."""
        if not self._owner.is_here:
            return []
        with self._lock:
            here, self._workers = self._workers, []
        count = count if self._found_by == _what_finds() else 0
        taken = [worker for worker in here if not worker.how_it_ended(0.0)][:count]
        for worker in here:
            if worker not in taken:
                worker.end()
        return taken

    def end(self) -> None:
        """End all. Safe to call twice."""
        self.take(0)


def _what_finds() -> tuple[Any, ...]:
    """The state that a process has from its start; its other variables become this one's when it is taken. The folder,
    which may be gone, is what a part of sys.path may be relative to."""
    return list(sys.path), Path("/proc/self/cwd").readlink(), visible_devices()


AHEAD = _Ahead()
