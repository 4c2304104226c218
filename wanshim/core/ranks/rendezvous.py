"""Ranks find the round in which all of them make the same call, through a store and without a collective.

No rank counts its calls: a rank that makes one call more or fewer than the others would be one off for ever. The
store holds the number of the open round. A call joins that round. The last rank to join closes it as complete; a rank
whose deadline passes first closes it without itself, and the ranks that still wait join the next one with the time
they have left. One compare-and-set decides which of the two it is, so every rank of a round reads the same outcome,
and what a rank left in a round that did not become complete is never read. A rank that cannot take part ends the
rendezvous with its error, which every other rank raises, now or later.

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wanshim.errors import RankAbsent, RanksFailed

from .store import READ, set_once, stay_until_read, wait_for

KEPT_ROUNDS = 8  # a rank that was slow to join finds the outcome of the round that it read
FIRST_ERROR = "Look for the first error in the log of that rank"
_COMPLETE = "complete"
_GAVE_UP = "gave up"
_FAILED = "failed: "


@dataclass(frozen=True, slots=True)
class Round:
    """A complete round: its number, and the reply of each rank, in rank order."""

    number: int
    replies: list[Any]


class Rendezvous:
    """A meeting of ranks under `name` in `store`; one call at a time per process.

    Args:
        store: a `torch.distributed` store that all ranks reach.
        name: the same on every rank; nobody else uses keys that begin with it.
        ranks: the job's number of each, in the same order on every rank; for messages.
        rank: this process's place among them.
    """

    def __init__(self, store: Any, name: str, ranks: Sequence[int], rank: int) -> None:
        self._store, self._name = store, name
        self._ranks, self._rank, self._size = ranks, rank, len(ranks)

    def meet(self, mine: Any, timeout_s: float, call: str) -> Round:
        """Leave `mine` (JSON) and return what all ranks left in one round.

        Args:
            timeout_s: seconds to wait for the other ranks.
            call: in which they come, for messages.

        Raises:
            RankAbsent: not all ranks came within `timeout_s`; the next round is not affected.
            RanksFailed: a rank called `fail`.
            RuntimeError, OSError: the store cannot be reached.
        """
        end = time.monotonic() + timeout_s
        text, seen = json.dumps(mine, sort_keys=True), set[int]()
        while True:
            number = self._current()
            outcome = self._join(number, text, end)
            if outcome.startswith(_FAILED):
                raise RanksFailed(outcome.removeprefix(_FAILED), hint=FIRST_ERROR)
            self._advance(number)
            self._forget(number - KEPT_ROUNDS)
            keys = {rank: f"{self._name}/{number}/{rank}" for rank in range(self._size)}
            if outcome == _COMPLETE:
                replies = [json.loads(self._store.get(key)) for key in keys.values()]
                stay_until_read(self._store, f"{self._name}/{number}", self._size, host=self._rank == 0)
                return Round(number, replies)
            here = {rank for rank, key in keys.items() if self._store.check([key])}
            seen |= here
            if outcome == f"{_GAVE_UP} {self._rank}" or time.monotonic() >= end:
                raise self._absent(sorted(keys.keys() - seen), sorted(seen - here), call, timeout_s)

    def fail(self, text: str) -> None:
        """End the rendezvous for good: who waits here or comes later raises `RanksFailed` with the first text. Waits
        for nobody."""
        while not self._close(number := self._current(), f"{_FAILED}{text}").startswith(_FAILED):
            self._advance(number)

    def _absent(self, never: Sequence[int], left: Sequence[int], call: str, timeout_s: float) -> RankAbsent:
        """The error of this rank for those that joined no round in which it waited, and those that joined one and gave
        up before the others came."""

        def named(places: Sequence[int]) -> str:
            return f"rank{'s' * (len(places) > 1)} {', '.join(str(self._ranks[place]) for place in places)}"

        parts = [f"{named(never)} did not call {call} within {timeout_s:g} s"] if never else []
        parts += [f"{named(left)} called {call} and gave up before all ranks were there"] if left else []
        return RankAbsent(
            "; ".join(parts) or f"not all ranks called {call} within {timeout_s:g} s",
            expected=f"each of ranks {', '.join(map(str, self._ranks))} to call {call} as often as the others",
            hint="Look whether that rank failed, is busy elsewhere, skips the call or runs without wanshim; "
            "the next call that all ranks make works again",
        )

    def _join(self, number: int, text: str, end: float) -> str:
        """Come to round `number` and return its outcome."""
        key = f"{self._name}/{number}"
        self._store.set(f"{key}/{self._rank}", text)
        if self._store.add(f"{key}/came", 1) == self._size:
            return self._close(number, _COMPLETE)
        try:
            wait_for(self._store, [f"{key}/outcome"], end - time.monotonic())
        except BaseException:  # an interrupt: the others must not count on this rank
            self._close(number, f"{_GAVE_UP} {self._rank}")
            self._advance(number)
            raise
        return self._close(number, f"{_GAVE_UP} {self._rank}")

    def _close(self, number: int, outcome: str) -> str:
        """Close the round with `outcome` unless it is closed already; return the outcome that stands."""
        return set_once(self._store, f"{self._name}/{number}/outcome", outcome)

    def _current(self) -> int:
        """The round that a call joins now, as the store says."""
        key = f"{self._name}/round"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _advance(self, number: int) -> None:
        """Let the next call join the next round. Every rank does so before it goes on: the next call here may be by
        another object of the same name, which knows only what the store says."""
        self._store.compare_set(f"{self._name}/round", str(number) if number else "", str(number + 1))

    def _forget(self, number: int) -> None:
        """Delete an old round's keys; what another rank still writes there stays, a few bytes."""
        if number < 0:
            return
        for key in (str(self._rank), "came", "outcome", *READ):
            with contextlib.suppress(RuntimeError, OSError):
                self._store.delete_key(f"{self._name}/{number}/{key}")
