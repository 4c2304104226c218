"""The reports of each rank of a group about itself while exchanges run, and the way of a failure to all of them.

Each rank keeps one status in the store of torch.distributed: a beat, the inputs of its last calls, its step, its
failure. A thread on each rank publishes its own status and reads the others' at intervals, on a connection of its own,
so that neither a hung GPU nor a waiting main thread stops it. The first failure is final: the thread aborts the
group's communicator, which wakes whoever waits in it, and every rank raises the same cause.

A beat stands still while its rank's interpreter is held, as by a slow save. Whether a rank of the same machine has
ended is therefore asked of the kernel, and beats count for ranks of other machines alone. They are counted, never
compared with a clock: only how long a beat stands still here matters.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wanshim.core.shared.processes import process, process_state
from wanshim.core.shared.text import named_line
from wanshim.errors import RankDisagreement, RanksFailed

from .group import Group

_INTERVAL_SECONDS = 0.2
_CALLS_KEPT = 8
ALONE_SECONDS = 3600.0  # for what one rank does alone between two signs of it
_FAREWELL_SECONDS = 2.0
_CONSEQUENCES = ("connection", "waited", "store")  # failures that another rank's failure explains

SAME_INPUTS = (
    "Give the ranks of one group the same sample, timestep and noise; what one rank calls alone, as for a validation, "
    "it calls under torch.no_grad()"
)

DISAGREEMENTS = {  # the kinds of failure in which each rank is well and they differ: what is expected, and a hint
    "different": ("the same inputs on every rank of the group", SAME_INPUTS),
    "loss": (
        "the same loss on every rank of the group",
        "Compute it from the model's output and the weights: inside blocks each rank has tokens of its own. Draw its "
        "weights from generators with the same seed on every rank",
    ),
    "trained": (
        "the same trained weights, and numbers of the optimizer such as lr, on every rank of the group",
        "Change them on every rank alike: accelerate.utils.broadcast_object_list brings what one rank has found to all",
    ),
}

Status = dict[str, Any]


def disagreement(kind: str, found: str) -> RankDisagreement:
    expected, hint = DISAGREEMENTS[kind]
    return RankDisagreement(found, expected=expected, hint=hint)


class Stops(ABC):
    """The causes that stopped a group, on each of its ranks."""

    failed = False
    held_at = 0.0  # when another rank was last known to compute alone, by this process's monotonic clock

    @abstractmethod
    def fail(self, kind: str, text: str) -> None:
        """This rank has failed."""

    @abstractmethod
    def cause(self) -> BaseException:
        """Why the group stopped: an error, or a rank's normal exit, which ends the others with its status."""

    def fail_with(self, error: BaseException) -> None:
        if isinstance(error, SystemExit) and not error.code:
            self.fail("exit", "ended normally")
        else:
            self.fail("error", named_line(error))

    def check(self) -> None:
        """Raise what stopped the group, if anything did."""
        if self.failed:
            raise self.cause()


class Watch(Stops):
    """The statuses of the ranks of one group, seen from one of them.

    Args:
        group: with a connection to the store that nothing else uses.
        deadline: seconds that any wait may take.
        overdue: returns what this rank has waited for longer than the deadline, else None.
        abort: wakes every thread of this process that waits in the group's communicator.
    """

    def __init__(
        self, group: Group, deadline: float, *, overdue: Callable[[], str | None], abort: Callable[[], None]
    ) -> None:
        self._group, self.rank, self.ranks, self.deadline = group, group.rank, group.ranks, deadline
        self.silence = min(20.0, deadline / 4)  # so long may a rank be stopped, or away where an exchange has failed
        self._store, self._overdue, self._abort = group.store, overdue, abort
        self._mine: Status = {"beat": 0, "calls": [], "step": "start", "failure": None, "left": False}
        self._mine |= {"turns": [], "alone": 0}
        self._mine["process"] = process()
        self._statuses: list[Status] = [self._mine] * group.size
        self._moved = [time.monotonic()] * group.size
        self._alone_since = list(self._moved)
        self._lock = threading.RLock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="wanshim-sequence", daemon=True)

    def start(self, model: Mapping[str, Any]) -> None:
        """Publish what this rank shards and wait until every rank of the group has done so.

        Raises:
            RankDisagreement: a rank shards something else.
            RanksFailed: a rank did not come within the deadline.
        """
        self._publish()
        models = self._group.gather("model", json.dumps(model, sort_keys=True), self.deadline, "shard_sequence")
        if len(set(models)) > 1:
            raise RankDisagreement(
                "The ranks shard different models:\n" + self._table(models),
                expected="the same model on every rank of the group",
            )
        self._read()
        # every rank runs now: one that does not cannot be seen from here, and is judged by its beats
        names = [status["process"] for status in self._statuses]
        self._processes = ["" if process_state(name) == "ended" else name for name in names]
        self._chained = sys.excepthook
        sys.excepthook = self._hook = self._on_uncaught
        atexit.register(self.stop)  # a thread that still speaks to the store would end the interpreter badly
        self._thread.start()

    def called(self, number: int, inputs: str) -> None:
        """This rank was called for the `number`-th time with `inputs`, shapes and dtypes; the thread compares them."""
        with self._lock:
            self._mine["calls"] = [*self._mine["calls"][1 - _CALLS_KEPT :], [number, inputs]]

    def takes_turn(self, number: int, call: str) -> None:
        """This rank begins the `number`-th call that all ranks make; the thread compares what the ranks call."""
        with self._lock:
            self._mine["turns"] = [*self._mine["turns"][1 - _CALLS_KEPT :], [number, call]]
            self._mine["alone"] = 0

    def works_alone(self) -> None:
        """This rank does what no other rank does, until its next turn: the others do not count that time."""
        with self._lock:
            first, self._mine["alone"] = not self._mine["alone"], self._mine["alone"] + 1
        if first:
            self._wake.set()

    def turn_of(self, rank: int) -> float:
        """The last call of all ranks that a rank is known to have begun; infinite if it has left."""
        status = self._statuses[rank]
        return math.inf if status["left"] else status["turns"][-1][0] if status["turns"] else 0

    @property
    def step(self) -> str:
        """The step of this rank, for messages; it is published with the next beat."""
        return str(self._mine["step"])

    def at(self, step: str) -> None:
        self._mine["step"] = step

    def fail(self, kind: str, text: str) -> None:
        """This rank has failed. The first failure counts, unless a later one explains it; it is in the store when this
        returns."""
        with self._lock:
            if not self.failed or (self._lost_connection and kind != "connection"):
                self._mine["failure"] = [kind, text]
                self.failed = True
        with contextlib.suppress(RuntimeError, OSError):
            self._publish()
        self._wake.set()

    def fail_with(self, error: BaseException) -> None:
        super().fail_with(error)
        if isinstance(error, SystemExit):  # `sys.excepthook` does not see it
            self._wait_until_known()

    def cause(self) -> BaseException:
        """Why the group stopped, as every rank reports it; waits, within bounds, until the first cause is known."""
        end = time.monotonic() + 1.5 * self.silence + 2.0
        while not self._causes() and time.monotonic() < end:
            time.sleep(0.02)
        found = self._causes() or [(r, s["failure"]) for r, s in enumerate(self._statuses) if s["failure"]]
        for _, (kind, text) in found:
            if kind in DISAGREEMENTS:
                return disagreement(kind, text)
        if found and all(kind == "exit" for _, (kind, _) in found):
            return SystemExit(0)
        said = dict.fromkeys(
            text if kind == "gone" else f"rank {self.ranks[rank]}: {text}" for rank, (kind, text) in found
        )
        return RanksFailed(
            f"A sequence-parallel step over ranks {', '.join(map(str, self.ranks))} stopped: {'; '.join(said)}",
            expected="every rank to complete the step",
            hint="Fix the cause in that rank's log, then restart the job, "
            "or call remove() and shard_sequence() again on every rank",
        )

    def stop(self) -> None:
        """Leave the group. Safe to call twice."""
        if sys.excepthook is getattr(self, "_hook", None):
            sys.excepthook = self._chained
        if self._stop.is_set():
            return
        atexit.unregister(self.stop)
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._mine["left"] = True
        with contextlib.suppress(RuntimeError, OSError):
            self._publish()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(_INTERVAL_SECONDS)
            self._wake.clear()
            late = None if self.failed else self._overdue()
            if late is not None:
                self.fail("waited", f"nothing within {self.deadline:g} s in {late}")
            try:
                self._publish()
                states = [process_state(name) for name in self._processes]
                self._read()  # after: whoever has ended has said before whether it left
            except (RuntimeError, OSError):
                if self._stop.is_set():
                    return
                self.fail(
                    "store", f"the store of torch.distributed, which rank 0 of the job hosts, is gone; {self._at()}"
                )
                self._abort()
                return
            if not self.failed or self._lost_connection:
                self._judge(states)
            if self.failed:
                self._abort()

    @property
    def _lost_connection(self) -> bool:
        """This rank knows only that an exchange failed, not yet why."""
        return bool(self._mine["failure"]) and self._mine["failure"][0] == "connection"

    def _judge(self, states: Sequence[str]) -> None:
        """Fail with what the statuses, and the states of the processes, say, if they say anything."""
        failures = [r for r, status in enumerate(self._statuses) if status["failure"] and r != self.rank]
        different = different_calls([status["calls"] for status in self._statuses])
        apart = different_calls([status["turns"] for status in self._statuses])
        now = time.monotonic()
        unknown = self.silence if self._lost_connection else self.deadline
        patience = {"ended": -1.0, "stopped": self.silence, "unknown": unknown, "runs": math.inf}
        silent = [
            rank
            for rank, (moved, state) in enumerate(zip(self._moved, states, strict=True))
            if rank != self.rank
            and now - moved > patience[state]
            and not (self._statuses[rank]["left"] or self._statuses[rank]["failure"])
        ]
        if different:
            self.fail("different", "The ranks were called with different inputs:\n" + self._table(different))
        elif apart:
            self.fail("different", "The ranks of the group do not make the same calls:\n" + self._table(apart))
        elif silent:
            gone = ", ".join(str(self.ranks[rank]) for rank in silent)
            state = states[silent[0]]
            why = {"ended": "its process has ended", "stopped": f"its process is stopped, for {self.silence:g} s"}
            sign = why.get(state, f"no sign of life for {unknown:g} s")
            self.fail("gone", f"rank {gone}: gone, {sign}, last in {self._at(silent[0])}")
        elif failures:
            self.fail("connection", f"stopped because rank {self.ranks[failures[0]]} failed")

    def _causes(self) -> list[tuple[int, tuple[str, str]]]:
        """The failures that no other rank's failure explains."""
        found = [(rank, tuple(s["failure"])) for rank, s in enumerate(self._statuses) if s["failure"]]
        first = [(rank, failure) for rank, failure in found if failure[0] not in _CONSEQUENCES]
        if first:
            return [(rank, failure) for rank, failure in first if failure[0] != "exit"] or first
        waited = [(rank, failure) for rank, failure in found if failure[0] == "waited"]
        if waited:
            places = "; ".join(f"rank {self.ranks[r]} is in {self._at(r)}" for r in range(len(self.ranks)))
            return [(rank, (kind, f"{text} ({places})")) for rank, (kind, text) in waited[:1]]
        return [(rank, failure) for rank, failure in found if failure[0] == "store"]

    def _at(self, rank: int | None = None) -> str:
        status = self._statuses[self.rank if rank is None else rank]
        return f"call {status['calls'][-1][0] if status['calls'] else 0}, {status['step']}"

    def _publish(self) -> None:
        with self._lock:
            self._mine["beat"] += 1
            self._store.set(f"status/{self.rank}", json.dumps(self._mine))

    def _read(self) -> None:
        for rank in range(len(self.ranks)):
            if rank == self.rank:
                continue
            said = json.loads(self._store.get(f"status/{rank}"))
            now = time.monotonic()
            if said["beat"] != self._statuses[rank]["beat"]:
                self._moved[rank] = now
            if said["alone"] != self._statuses[rank]["alone"]:
                self._alone_since[rank] = now
            if said["alone"] and now - self._alone_since[rank] < ALONE_SECONDS:
                self.held_at = now
            self._statuses[rank] = said

    def _table(self, texts: Sequence[str]) -> str:
        return "\n".join(f"  rank {rank}: {text}" for rank, text in zip(self.ranks, texts, strict=True))

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """An error that ends this process: the others learn its name before the store goes with it."""
        self.fail_with(error)
        self._wait_until_known()
        self._chained(kind, error, trace)

    def _wait_until_known(self) -> None:
        """A rank that hosts the store and is about to end waits a moment: the others read why before it is gone."""
        end = time.monotonic() + _FAREWELL_SECONDS
        with contextlib.suppress(RuntimeError, OSError):
            while self.ranks[self.rank] == 0 and time.monotonic() < end:
                self._read()
                if all(status["failure"] or status["left"] for status in self._statuses):
                    break
                time.sleep(0.05)


class WatchedByAnother(Stops):
    """In place of a `Watch` where another process, or another thread of this one, sees the other ranks fail.

    Args:
        patience: seconds that a failed exchange waits before it raises, in a process that is ended by whoever watches:
            what failed first is named, not what followed from it.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.step = "start"
        self._text, self._patience = "", patience

    def called(self, number: int, inputs: str) -> None:
        """The inputs of all ranks come from one process."""

    def at(self, step: str) -> None:
        self.step = step

    def fail(self, kind: str, text: str) -> None:
        self._text = self._text or text
        self.failed = True

    def cause(self) -> RanksFailed:
        time.sleep(self._patience)
        return RanksFailed(f"A sequence-parallel step stopped in {self.step}: {self._text}")

    def stop(self) -> None:
        """Nothing runs."""


def different_calls(calls: Sequence[Sequence[tuple[int, str]]]) -> list[str]:
    """The inputs of each rank at the first call for which they differ; empty where all known calls agree."""
    known = [dict(of_rank) for of_rank in calls]
    for number in sorted(set[int]().union(*known)):
        inputs = [of_rank.get(number) for of_rank in known]
        if len({text for text in inputs if text is not None}) > 1:
            return [text if text is not None else "not known" for text in inputs]
    return []
