"""Which calls the ranks of a group make together, and which one of them makes alone.

Calls that all ranks make are counted: the number of such calls, the turn, names the same place of the program on every
rank. A training step is made of them. A call without gradients may be one rank's own, as a validation by the main
process is: the rank offers it, waits a moment for the others' offers, and the group decides once for the whole turn.
While a rank computes alone the others wait for it in whatever they do next, beyond the group's deadline.
"""

from __future__ import annotations

import time

from wanshim.core.ranks.store import set_once
from wanshim.core.ranks.watch import Watch

from .group import SequenceGroup

OFFER_SECONDS = 0.5  # for the ranks to make a call without gradients together
_POLL_SECONDS = 0.002
_TOGETHER, _ALONE = "together", "alone"


class Attendance:
    """The turns of one group, as this rank counts them."""

    def __init__(self, group: SequenceGroup) -> None:
        assert isinstance(group.watch, Watch)  # the ranks see each other
        self._group, self._watch, self._store = group, group.watch, group.store
        self._turn = self._met = 0
        self._alone_in: int | None = None
        self._left: list[tuple[int, str]] = []  # this rank's keys in the store, and the turn of each

    def join(self, call: str) -> None:
        """This rank begins a call that all ranks make."""
        self._turn, self._met = self._turn + 1, 0
        self._watch.takes_turn(self._turn, call)

    def together(self, call: str) -> bool:
        """Whether all ranks make this call now, which each describes in the same words, or this rank makes it alone.
        The answer is the same on every rank that calls this in one turn; once it is no, it stays so for the turn."""
        if self._alone_in != self._turn and self._all_offer(call):
            self.join(call)
            return True
        self._alone_in = self._turn
        self.work_alone()
        return False

    def work_alone(self) -> None:
        """This rank works by itself until its next call, for as long as it takes: the others, who wait for it, do not
        count that time."""
        self._watch.works_alone()

    def meet(self, seconds: float) -> bool:
        """Return when every rank has called this, or those that have not are further on and will not in this turn.

        Returns:
            Whether every rank has, the same on each that calls it.
        """
        self._met += 1
        before = self._watch.step
        self._watch.at("waiting for the other ranks")
        key = f"met/{self._turn}"
        self._leave(f"{key}/{self._group.rank}/{self._met}")
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        missing = {rank: f"{key}/{rank}/{self._met}" for rank in others}

        def are_here() -> bool:
            for rank in [rank for rank, place in missing.items() if self._store.check([place])]:
                del missing[rank]
            return all(self._is_past(rank) for rank in missing)

        self._group.poll(are_here, interval=_POLL_SECONDS, seconds=seconds)
        self._watch.at(before)
        return not missing

    def _all_offer(self, call: str) -> bool:
        key = f"offer/{self._turn}"
        self._leave(f"{key}/{self._group.rank}", call)
        places = [f"{key}/{rank}" for rank in range(self._group.size)]
        end = time.monotonic() + OFFER_SECONDS
        while not (here := self._store.check(places)) and time.monotonic() < end:
            self._watch.check()
            if self._store.check([f"{key}/outcome"]) or any(map(self._is_past, range(self._group.size))):
                break
            time.sleep(_POLL_SECONDS)
        agree = here and len({self._store.get(place) for place in places}) == 1
        outcome = set_once(self._store, f"{key}/outcome", _TOGETHER if agree else _ALONE)
        if self._group.rank == 0:
            self._left.append((self._turn, f"{key}/outcome"))
        return outcome == _TOGETHER

    def _leave(self, key: str, text: str = "") -> None:
        """Set a key for the other ranks, and delete this rank's of turns that none of them is at any more."""
        self._store.set(key, text)
        for _, old in (gone := [entry for entry in self._left if entry[0] < self._turn - 1]):
            self._store.delete_key(old)
        self._left = [entry for entry in self._left if entry not in gone] + [(self._turn, key)]

    def _is_past(self, rank: int) -> bool:
        """Whether this rank has begun a later call of the group's, or has left it."""
        return rank != self._group.rank and self._watch.turn_of(rank) > self._turn
