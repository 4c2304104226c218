"""Groups of NCCL's in which tensors go to other processes. NCCL itself needs GPUs: its calls are noted here."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from wanshim.core.workers import mover as module
from wanshim.core.workers.mover import Mover


class Noted:
    """Stands for a process group of NCCL's, which does not come up on the CPU."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[int, int]]] = []
        self.ended = 0

    def _start_coalescing(self) -> None:
        self.groups.append([])

    def _end_coalescing(self) -> Noted:
        return self

    def wait(self) -> None:
        self.ended += 1

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.groups[-1].append((int(tensors[0]), rank))


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (2, [4]), (3, [6]), (7, [6, 6, 2])])
def test_each_tensor_goes_to_each_rank_in_groups_that_end_before_the_next(
    monkeypatch: pytest.MonkeyPatch, count: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 3)
    peers = Noted()
    tensors = [torch.tensor(number) for number in range(count)]
    mover = Mover(torch.device("cpu"))
    mover._peers = peers
    mover._in_groups(tensors, [(1, peers.send), (2, peers.send)])
    assert [len(group) for group in peers.groups] == sizes
    assert list(chain.from_iterable(peers.groups)) == [(number, rank) for number in range(count) for rank in (1, 2)]
    assert peers.ended == len(sizes)
