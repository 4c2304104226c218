"""How the ranks of a run save together: what each knows, and at the end of which step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from wanshim.core.ranks.rendezvous import Absent, Rendezvous
from wanshim.core.ranks.store import apart, default_store

WAIT_S = 1800.0  # for the slowest rank: it may be writing the state


class Ranks:
    """All ranks of the default process group, or this process alone. All make the same calls in the same order.

    What they say goes through the store, on a connection of its own; votes through a gloo group of their own, since
    they wait for nobody. No GPU waits for either.
    """

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if several else None
        self.rank: int = dist.get_rank() if several else 0
        self.size: int = dist.get_world_size() if several else 1
        self._rendezvous: Rendezvous | None = None
        if several:
            self._rendezvous = Rendezvous(apart(default_store()), "wanshim/resume", self.rank, self.size)
        self._votes = torch.zeros(1, dtype=torch.int64)
        self._work: Any = None

    def gather(self, value: Any) -> list[Any]:
        """The value of JSON of each rank, on every rank."""
        if self._rendezvous is None:
            return [value]
        try:
            replies = self._rendezvous.meet(value, WAIT_S).replies
        except Absent as reason:
            raise reason.error(range(self.size), "the training task", WAIT_S) from None
        if self._work is not None:  # all have voted by now
            # A run ends behind a gathering. Under a vote that is still on its way gloo's thread would free a tensor
            # after the interpreter, which aborts the process.
            self._work.wait()
        return replies

    @property
    def delay(self) -> int:
        """How many calls of `vote` later a vote counts."""
        return int(self.group is not None)

    def vote(self, mine: int) -> int:
        """The highest vote of all ranks: of this call in one process, of the last one in several. So no rank waits."""
        if self.group is None:
            return mine
        decided = 0
        if self._work is not None:
            self._work.wait()
            decided = int(self._votes)
        self._votes.fill_(mine)
        self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return decided
