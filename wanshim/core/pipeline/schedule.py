"""Who issues what next on each stage: one forward, one backward (1F1B).

Method: PipeDream-Flush (Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021), with host
threads in place of processes. Stage `s` of `S` takes `S - s` forwards first, then alternates, so it never
holds more than `S - s` micro-batches, however many there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum


class Unit(Enum):
    """Half of a micro-batch's work on one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Abandoned(Exception):
    """Raised in a waiting micro-batch after another one failed: it has nothing left to do."""


def pipeline_bound(stages: int, micro_batches: int) -> float:
    """The most a pipeline of equal stages gains over one device: `M * S / (M + S - 1)`."""
    return micro_batches * stages / (micro_batches + stages - 1)


class Schedule:
    """The turns of all stages and the one place where threads wait for each other.

    Every wait ends: with its condition met, or with the first error that a micro-batch reported.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Begin the next round of micro-batches."""
        self._done = {unit: [0] * self.num_stages for unit in Unit}
        self._total: int | None = None

    def due(self, stage: int) -> tuple[Unit, int]:
        """The unit a stage issues next, and of which micro-batch."""
        forwards, backwards = self._done[Unit.FORWARD][stage], self._done[Unit.BACKWARD][stage]
        more = self._total is None or forwards < self._total
        if more and forwards - backwards < self.num_stages - stage:
            return Unit.FORWARD, forwards
        return Unit.BACKWARD, backwards

    def take(self, unit: Unit, stage: int, number: int) -> None:
        """Wait for this unit's turn on the stage. The turn is held until `give`."""
        self.wait_until(lambda: self.due(stage) == (unit, number))

    def give(self, unit: Unit, stage: int) -> None:
        """Hand the stage on to the unit that follows."""
        with self._changed:
            self._done[unit][stage] += 1
            self._changed.notify_all()

    def close(self, total: int) -> None:
        """Say how many micro-batches there are, so that the last backwards need not wait for a forward."""
        with self._changed:
            self._total = total
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Report the error that ends the round; the first one counts."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def notify(self) -> None:
        """Something a waiting thread may look at has changed."""
        with self._changed:
            self._changed.notify_all()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`.

        Raises:
            Abandoned: another micro-batch failed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or holds())
            if self.error is not None:
                raise Abandoned
