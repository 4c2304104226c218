"""Seconds in which a device waits for the samples of a data loader, and how many workers would load them in time."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")
LEAST_SECONDS, LEAST_SHARE = 10.0, 0.1  # of waiting, that it is worth a word


class SampleWaits:
    """The waits of a run's epochs. Of an epoch's first two samples, for which workers start, nothing counts: accelerate
    fetches them before the first step.

    Args:
        device: on a GPU a wait begins when it has computed what it was given, and ends when the next sample is there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # which the GPU has yet to reach
        self.waited = self.loaded = self.seconds = 0.0

    def around(self, iterate: Callable[[], Iterator[T]]) -> Iterator[T]:
        """The samples of `iterate()`, each fetched when it is asked for."""
        samples, last = iterate(), 0.0
        for number in itertools.count():
            mark, asked = self._mark(), time.perf_counter()
            try:
                sample = next(samples)
            except StopIteration:
                return
            now = time.perf_counter()
            if number > 1:
                self.seconds += now - last
                self.loaded += now - asked
                self._add(mark)
            last = now
            yield sample

    def workers_in_time(self, workers: int) -> int | None:
        """The number of workers that would load samples as fast as the device takes them; None: it hardly waits.

        Args:
            workers: the number that there is; 0: the process itself loads.
        """
        if self.waited < max(LEAST_SECONDS, LEAST_SHARE * self.seconds):
            return None
        busy = max(self.seconds - self.waited, 0.01 * self.seconds)
        loading = workers * self.seconds if workers else self.loaded
        return max(workers + 1, math.ceil(loading / busy))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add(self, begun: Any) -> None:
        ended = self._mark()
        if self._device.type != "cuda":
            self.waited += ended - begun
            return
        self._pairs.append((begun, ended))
        while self._pairs and self._pairs[0][1].query():
            first, last = self._pairs.popleft()
            self.waited += first.elapsed_time(last) / 1000
