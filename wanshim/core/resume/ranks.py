"""The vote of the ranks of a run to save together: what each knows, and at the end of which step."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wanshim.core.ranks import nccl
from wanshim.core.ranks.group import Group

WAIT_S = 1800.0  # for the slowest rank: it may be writing the state


class Ranks:
    """All ranks of the default process group, or this process alone. All make the same calls in the same order.

    What they say goes through the store, on a connection of its own; votes through connections of their own, since
    they wait for nobody. No GPU waits for either.
    """

    def __init__(self) -> None:
        self._group = Group.of_job(own=True)
        self.rank, self.size = self._group.rank, self._group.size
        self._votes = torch.zeros(1, dtype=torch.int64)
        self._work: Any = None
        self._peers: Any = None
        if self.size > 1:
            self._peers = self._group.connect("wanshim/votes", self._votes.device, timedelta(seconds=WAIT_S), self)
            # gloo may connect at the first traffic (TORCH_GLOO_LAZY_INIT), and then waits for a rank that is gone
            self._peers.allreduce([self._votes]).wait()

    def gather(self, value: Any) -> list[Any]:
        """The value of JSON of each rank, on every rank."""
        replies = self._group.gather("wanshim/resume", value, WAIT_S, "the training task")
        if self._work is not None:  # all have voted by now
            # A run ends behind a gathering. Under a vote that is still on its way gloo's thread would free a tensor
            # after the interpreter, which aborts the process.
            self._work.wait()
        return replies

    @property
    def delay(self) -> int:
        """The number of calls of `vote` after which a vote counts."""
        return int(self.size > 1)

    def vote(self, mine: int) -> int:
        """The highest vote of all ranks: of this call in one process, of the last one in several. So no rank waits."""
        if self.size == 1:
            return mine
        decided = 0
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError:
                nccl.abort(self._peers)  # or ranks that have no connection to the lost one would wait for this one
                raise
            decided = int(self._votes)
        self._votes.fill_(mine)
        self._work = self._peers.allreduce([self._votes], dist.ReduceOp.MAX)
        return decided
