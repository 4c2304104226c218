"""Ranks that share a store: the round in which all make the same call, what each brings to it, and connections between
them.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from wanshim.core.shared.text import first_line, named_line
from wanshim.errors import RankAbsent, RanksFailed

from .store import READ, LocalStore, default_store, set_once, stay_until_read, wait_for

KEPT_ROUNDS = 8  # a rank that was slow to join finds the outcome of the round that it read
FIRST_ERROR = "Look for the first error in the log of that rank"
_COMPLETE = "complete"
_GAVE_UP = "gave up"
_FAILED = "failed: "
_LOOPBACK = "127.0.0.1"
_LOCAL_LIMIT = timedelta(seconds=30)  # for processes of one machine to connect by gloo: all have come


class Group:
    """Ranks of a job, or processes of one machine. This process is `rank` of `size`; without a store it meets nobody.

    Args:
        ranks: the job's number of each, in the group's order; for messages.
        rank: this process's place among them.
        store: of torch.distributed, which all of them reach. A `LocalStore` is one machine's: connections bind no
            address that another machine reaches.
    """

    def __init__(self, ranks: Sequence[int] = (0,), rank: int = 0, store: Any = None) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.store = store

    @classmethod
    def of_job(cls, group: Any = None, *, name: str = "", own: bool = False) -> Group:
        """The ranks of a process group, which this process is one of; this process alone where there is none.

        Args:
            group: of torch.distributed; None: all ranks.
            name: the keys of these ranks in the store begin with it.
            own: reach the store through another connection: a wait in one holds up every thread that shares it.

        Raises:
            WanshimError: the default process group is that of the process that this one was forked from.
        """
        import torch.distributed as dist

        store = default_store()
        if store is None:
            return cls()
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if own and len(ranks) > 1:
            store = store.clone()
        if name:
            store = dist.PrefixStore(f"{name}/{'-'.join(map(str, ranks))}", store)
        return cls(ranks, ranks.index(dist.get_rank()), store)

    @classmethod
    def of_file(cls, file: int, name: str, ranks: Sequence[int], rank: int) -> Group:
        """Processes of this machine that alone have a file without a name.

        Args:
            file: its descriptor.
            name: their keys in the store begin with it.
            rank: this process's number, one of `ranks`.
        """
        import torch.distributed as dist

        store = dist.PrefixStore(name, dist.FileStore(f"/proc/self/fd/{file}", -1))
        return cls(ranks, ranks.index(rank), LocalStore(store))

    @property
    def is_local(self) -> bool:
        return isinstance(self.store, LocalStore)

    def meet(self, topic: str, mine: Any, seconds: float, call: str) -> Round:
        """The round in which all ranks come to `topic`, with what each brings.

        Args:
            mine: this rank's, as JSON.
            seconds: to wait for the others.
            call: in which they come, for messages.

        Raises:
            RankAbsent: not all ranks came.
            RanksFailed: a rank ended the topic by `fail`, or the store cannot be reached.
        """
        try:
            return Rendezvous(self.store, topic, self.ranks, self.rank).meet(mine, seconds, call)
        except RanksFailed:
            raise
        except (RuntimeError, OSError) as error:
            raise self.without_store(error) from error

    def gather(self, topic: str, mine: Any, seconds: float, call: str, error: BaseException | None = None) -> list[Any]:
        """The values that the ranks bring to `topic`, in rank order: see `meet`. A rank alone waits for nobody.

        Args:
            error: of this rank, which brings it in place of a value.

        Raises:
            RanksFailed: a rank brought an error; on the ranks without one.
        """
        if self.size == 1 or self.store is None:
            return [mine]
        brought = {"value": mine} if error is None else {"error": named_line(error)}
        replies = self.meet(topic, brought, seconds, call).replies
        failed = [
            f"rank {rank}: {reply['error']}"
            for rank, reply in zip(self.ranks, replies, strict=True)
            if "error" in reply
        ]
        if failed and error is None:
            raise RanksFailed(f"{call} failed on {'; '.join(failed)}", hint=FIRST_ERROR)
        return [reply.get("value") for reply in replies]

    @contextmanager
    def failing_together(self, topic: str, seconds: float, call: str) -> Iterator[None]:
        """An error of the body reaches the other ranks where they gather next on `topic`."""
        try:
            yield
        except RanksFailed:  # the others have it
            raise
        except Exception as error:
            with suppress(RanksFailed):
                self.gather(topic, None, seconds, call, error)
            raise

    def fail(self, topic: str, error: BaseException) -> None:
        """End the meetings of a topic for good: who waits there, or comes later, raises `RanksFailed` with the first
        error. Waits for nobody."""
        if self.store is not None:
            with suppress(RuntimeError, OSError):  # the store may be gone; what counts is the error that came first
                failed = f"rank {self.ranks[self.rank]} failed: {named_line(error)}"
                Rendezvous(self.store, topic, self.ranks, self.rank).fail(failed)

    def without_store(self, error: Exception) -> RanksFailed:
        """The error of this rank if the store cannot be reached."""
        return RanksFailed(
            f"rank {self.ranks[self.rank]} cannot reach the store of torch.distributed: {first_line(error)}",
            expected="the process that hosts it, rank 0 of the job, to be alive",
            hint="Look for the first rank that died and restart the job",
        )

    def connect(
        self,
        link: str,
        device: Any,
        limit: timedelta,
        holder: object,
        *,
        wait: Callable[[list[str]], None] | None = None,
        high_priority: bool = False,
    ) -> Any:
        """Connections between all ranks, each of which calls this, beside those of torch.distributed: a process group
        of NCCL for a GPU, else of gloo, for point-to-point traffic and exchanges.

        Args:
            link: names them; used once in the group.
            device: of the tensors that travel.
            limit: for the connection, and for each wait of gloo's.
            wait: returns when these keys are set, or raises. None: the backend waits for all ranks, which ends for no
                failure.
            holder, high_priority: see `nccl.connect`.

        Raises:
            RuntimeError: they did not connect.
        """
        import torch.distributed as dist

        from . import nccl

        if wait is not None:
            keys = [f"{link}/connecting/{rank}" for rank in range(self.size)]
            self.store.set(keys[self.rank], "1")
            wait(keys)
        store = dist.PrefixStore(link, self.store.store if self.is_local else self.store)
        if device.type == "cuda":
            ranks, local = (self.rank, self.size), self.is_local
            return nccl.connect(store, *ranks, device, limit, holder, high_priority=high_priority, local=local)
        if not self.is_local:
            return dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        backend: Any = dist.ProcessGroupGloo
        options = backend._Options()
        options._timeout, options._devices = min(limit, _LOCAL_LIMIT), [backend.create_device(hostname=_LOOPBACK)]
        return backend(store, self.rank, self.size, options)


@dataclass(frozen=True, slots=True)
class Round:
    """A complete round: its number, and the reply of each rank, in rank order."""

    number: int
    replies: list[Any]


class Rendezvous:
    """A meeting of ranks under `name` in `store`, without a collective; one call at a time per process.

    No rank counts its calls: a rank that makes one call more or fewer than the others would be one off for ever. The
    store holds the number of the open round. A call joins that round. The last rank to join closes it as complete; a
    rank whose deadline passes first closes it without itself, and the ranks that still wait join the next one with the
    time they have left. One compare-and-set decides which of the two it is, so every rank of a round reads the same
    outcome, and what a rank left in a round that did not become complete is never read. A rank that cannot take part
    ends the rendezvous with its error, which every other rank raises, now or later.

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
            with suppress(RuntimeError, OSError):
                self._store.delete_key(f"{self._name}/{number}/{key}")
