"""How the ranks of a run save together: what each knows, and at the end of which step."""

from __future__ import annotations

import json
from typing import Any

import torch


class Ranks:
    """All ranks of the default process group, or this process alone. All make the same calls in the same order.

    Messages go through a gloo group of their own: no GPU waits for them.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if several else None
        self.rank: int = dist.get_rank() if several else 0
        self.size: int = dist.get_world_size() if several else 1
        self._votes = torch.zeros(1, dtype=torch.int64)
        self._work: Any = None

    def gather(self, value: Any) -> list[Any]:
        """The value of JSON of each rank, on every rank."""
        import torch.distributed as dist

        if self.group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]), group=self.group)
        longest = int(max(sizes))
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.nn.functional.pad(mine, (0, longest - mine.numel())), group=self.group)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]

    @property
    def delay(self) -> int:
        """How many calls of `vote` later a vote counts."""
        return int(self.group is not None)

    def vote(self, mine: int) -> int:
        """The highest vote of all ranks: of this call in one process, of the last one in several. So no rank waits."""
        import torch.distributed as dist

        if self.group is None:
            return mine
        decided = self._decided()
        self._votes.fill_(mine)
        self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return decided

    def _decided(self) -> int:
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._votes)
