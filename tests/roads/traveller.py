"""Runs roads for a test session: the checkpoint is written once, and each reference is run once."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from .roads import CHECKPOINTING, Arrival, Road, check, travel

COMPILING = "its kernels are being compiled"
STARTS = 6  # a process ends with the kernels under way, so that each start of a tiny model brings some


class Traveller:
    """Args: at_once: how many commands run side by side."""

    def __init__(self, folder: Path, *, on_cpu: bool, at_once: int = 1) -> None:
        self.folder, self.checkpoint, self.on_cpu = folder, folder / "checkpoint", on_cpu
        self._pool = ThreadPoolExecutor(at_once)
        self._started: dict[tuple[str, str], Future[Arrival]] = {}
        self._lock = Lock()

    def start(self, roads: Iterable[Road]) -> None:
        """Begin to run these roads, in the background, with what they are compared with."""
        for road in roads:
            self._start(road.command, road.arguments, road.status)
            if road.reference is not None:
                self._start(road.reference, _own_arguments(road))

    def run(self, road: Road) -> Arrival:
        found = self._start(road.command, road.arguments, road.status).result()
        for start in range(1, STARTS):
            if COMPILING not in found.said:  # on a GPU: "once on this machine; later calls take them"
                break
            found = self._travel(road.command, road.arguments, road.status, f"{found.folder.name}.{start}")
        expected = None if road.reference is None else self._start(road.reference, _own_arguments(road)).result()
        check(road, found, expected)
        return found

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _start(self, command: str, arguments: str, status: int = 0) -> Future[Arrival]:
        key = command, arguments
        with self._lock:
            if key not in self._started:
                if "train.py" in command and not self.checkpoint.is_dir():
                    from wanshim.demo import wan_checkpoint

                    wan_checkpoint.write(self.checkpoint)
                name = str(len(self._started))
                self._started[key] = self._pool.submit(self._travel, command, arguments, status, name)
            return self._started[key]

    def _travel(self, command: str, arguments: str, status: int, name: str) -> Arrival:
        return travel(command, arguments, self.folder / name, self.checkpoint, on_cpu=self.on_cpu, status=status)


def _own_arguments(road: Road) -> str:
    """Those of the script, which the reference is given too: what the command has behind its dots."""
    more = CHECKPOINTING in road.command and CHECKPOINTING not in road.arguments
    return road.arguments + CHECKPOINTING if more else road.arguments
