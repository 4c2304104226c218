"""Workers of this process that all its pipelines of one request share: a pipeline object may live for one call."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from wanshim.core.sequence import SequenceGroup
from wanshim.core.workers import Workers

from . import tokens

if TYPE_CHECKING:
    from .binding import PipelineBinding
    from .shared_pipeline import SharedPipeline

# By process: a child's pipelines have workers of its own. Those of its parent stay here, untouched: their groups wait,
# when they go, for threads that a child does not have.
_KNOWN: dict[tuple[Any, ...], SharedWorkers] = {}


class SharedWorkers:
    """Workers of the pipelines of one request, by the device of their models. One call at a time uses them.

    The processes stay until the program ends, or the last pipeline that uses them is closed. Copies belong to modules:
    `Workers` frees those whose module is gone.
    """

    def __init__(self, deadline: float, prepare: str) -> None:
        self.lock = threading.RLock()
        self.users: WeakSet[SharedPipeline] = WeakSet()
        self.in_call: tuple[SharedPipeline, PipelineBinding] | None = None  # which runs now
        self._deadline, self._prepare = deadline, prepare
        self._workers: dict[torch.device, Workers] = {}
        self._groups: dict[tuple[int, tokens.Half], SequenceGroup] = {}

    @classmethod
    def find(cls, gpus: int | None, devices: tuple[str, ...] | None, deadline: float, prepare: str) -> SharedWorkers:
        """Those of every pipeline for which the same was asked."""
        return _KNOWN.setdefault((os.getpid(), gpus, devices, deadline, prepare), cls(deadline, prepare))

    def running(self, own: torch.device | None) -> Workers | None:
        """Workers beside this device, if it has any."""
        return None if own is None else self._workers.get(own)

    def on(self, devices: Sequence[torch.device]) -> Workers:
        """Workers on these devices beside the first; those that hold copies may run on more, which get no copies."""
        own, *others = devices
        here = self._workers.get(own)
        if here is not None and not here.have_started and len(here.devices) >= len(others):
            here.use(others)
        elif here is None or here.devices[: len(others)] != tuple(others):
            self.end(own)
            here = Workers(own, others, deadline=self._deadline, prepare=self._prepare)
            self._workers[own] = here
        return here

    def group(self, half: tokens.Half, workers: Workers) -> SequenceGroup:
        """This process's end of its half, among the processes that have the workers' file."""
        key = workers.file, half
        if key not in self._groups:
            if any(other != workers.file for other, _ in self._groups):  # of workers that are gone
                tokens.close_all(self._groups)
            self._groups[key] = tokens.join(half, workers.file, 0)
        return self._groups[key]

    def leave(self, user: SharedPipeline) -> None:
        """End the workers if nobody else uses them, else free what this pipeline alone has there."""
        self.users.discard(user)
        kept = [module for other in self.users for module in other.copied]
        for device, workers in list(self._workers.items()):
            if self.users:
                workers.keep_only(kept)
            else:
                self.end(device)

    def end(self, own: torch.device) -> None:
        """End the workers beside this device. The next call of a pipeline starts new ones."""
        tokens.close_all(self._groups)
        if own in self._workers:
            self._workers[own].close()
