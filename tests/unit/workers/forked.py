"""Workers that are forks of the tests' fork server, which has imported torch: an import takes longer than their work.

Started as users have them they are in test_workers.py's `pool` and in tests/distributed/workers.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import pytest

from tests.forking import forking
from wanshim.core.workers import process


class _Forked:
    """What the pool uses of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str]) -> None:
        end, paths = int(command[3]), list(command[5:])
        self._process: Any = forking().Process(target=_Worker(end, paths, descriptors), daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
        return int(self._process.exitcode)

    def kill(self) -> None:
        self._process.kill()


class _Worker:
    """Runs in the fork, where each descriptor gets the number that it has here."""

    def __init__(self, end: int, paths: list[str], descriptors: Sequence[int]) -> None:
        self.end, self.paths, self.descriptors = end, paths, descriptors

    def __getstate__(self) -> dict[str, Any]:  # pickled while the fork is being started
        return {**vars(self), "descriptors": {number: DupFd(number) for number in self.descriptors}}

    def __call__(self) -> None:
        import sys

        from wanshim.core.workers.server import main

        # Above all numbers that are wanted: one of them may be what another is here.
        high = {number: os.dup(passed.detach()) for number, passed in self.descriptors.items()}  # type: ignore[attr-defined]
        for number, passed in high.items():
            os.dup2(passed, number)
        sys.path[:] = self.paths
        main(self.end)


@pytest.fixture(scope="module")
def forked_in_module() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_start_process", _Forked)
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_start_process", _Forked)
