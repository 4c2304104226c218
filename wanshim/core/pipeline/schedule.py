"""The order in which each stage issues its work: one forward, one backward (1F1B).

Method: PipeDream-Flush (Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021), with host
threads in place of processes. Stage `s` of `S` takes `S - s` forwards first, then alternates, so it never
holds more than `S - s` micro-batches, however many there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

from wanshim.errors import WanshimError

LOOK_S = 5.0  # how often a waiting thread looks whether the others still live; nothing is given up for taking longer


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

    Every wait ends: with its condition met, or with the first error that a micro-batch reported. There is no deadline,
    since a step may take any time. Instead it is an error when nobody is left who could change anything: each
    micro-batch's thread and the caller (who submits and asks for backwards) waits, or has ended without a word.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._caller: threading.Thread | None = None
        self._waiting: dict[threading.Thread, tuple[Callable[[], bool], str]] = {}  # until what, and its name
        self.reset()

    def reset(self) -> None:
        """Begin the next round of micro-batches."""
        self._done = {unit: [0] * self.num_stages for unit in Unit}
        self._total: int | None = None

    def enroll(self, thread: threading.Thread) -> None:
        """Count on a micro-batch's thread, which is about to start, until it retires."""
        with self._changed:
            self._threads.append(thread)

    def retire(self, thread: threading.Thread) -> None:
        """Nobody need count on this thread any more."""
        with self._changed:
            self._threads.remove(thread)
            self._changed.notify_all()

    def lead(self) -> None:
        """This thread is the caller."""
        self._caller = threading.current_thread()

    def due(self, stage: int) -> tuple[Unit, int]:
        """The unit a stage issues next, and of which micro-batch."""
        forwards, backwards = self._done[Unit.FORWARD][stage], self._done[Unit.BACKWARD][stage]
        more = self._total is None or forwards < self._total
        if more and forwards - backwards < self.num_stages - stage:
            return Unit.FORWARD, forwards
        return Unit.BACKWARD, backwards

    def take(self, unit: Unit, stage: int, number: int) -> None:
        """Wait for this unit's turn on the stage. The turn is held until `give`."""
        self.wait_until(lambda: self.due(stage) == (unit, number), f"its {unit.value} on stage {stage}")

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

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until `holds()`. `what` names it in an error.

        Raises:
            Abandoned: another micro-batch failed meanwhile, or nobody is left who could make it hold.
        """
        me = threading.current_thread()
        with self._changed:
            self._waiting[me] = holds, what
            try:
                while self.error is None and not holds():
                    self.error = self._stuck()
                    if self.error is None:
                        self._changed.wait(LOOK_S)
                    else:
                        self._changed.notify_all()
            finally:
                del self._waiting[me]
            if self.error is not None:
                raise Abandoned

    def _stuck(self) -> WanshimError | None:
        """The error to raise where no known thread is left to change anything."""
        threads = [*self._threads, *([self._caller] if self._caller is not None else [])]
        states = []
        for thread in threads:
            holds, what = self._waiting.get(thread, (None, ""))
            if thread.is_alive() and (holds is None or holds()):
                return None
            name = "the caller" if thread is self._caller else thread.name
            states.append(f"{name} waits for {what}" if thread.is_alive() else f"{name} has ended")
        if not threads:
            return None
        return WanshimError(
            "no micro-batch can go on: " + ", ".join(states),
            expected="the backward of each micro-batch to be asked for before the forward of the next",
            hint="Call backward on each loss as soon as its forward returns",
        )
