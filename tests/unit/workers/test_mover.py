"""Groups of NCCL's in which tensors go to other processes. NCCL itself needs GPUs: its calls are noted here."""

from __future__ import annotations

import socket
from itertools import chain

import pytest
import torch

from wanshim.core.workers import mover as module
from wanshim.core.workers.link import Link
from wanshim.core.workers.mover import Mover
from wanshim.core.workers.packing import TensorSpec


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


def test_tensors_of_any_strides_and_dtype_arrive_over_the_links_of_all_receivers() -> None:
    given = torch.arange(48.0).reshape(2, 3, 8)
    sent = [
        torch.ones(0, 3),  # nothing is sent, and nothing is waited for
        given[..., ::2],
        given.transpose(0, 2),
        torch.arange(3.0).reshape(3, 1).expand(3, 5),
        given.bfloat16(),
        torch.tensor(True),
        given.to(torch.complex64),
        torch.nn.Parameter(given[0]),
    ]
    pairs = [socket.socketpair() for _ in range(2)]
    Mover(torch.device("cpu")).send(iter(sent), {rank: Link(ours) for rank, (ours, _) in enumerate(pairs, 1)})
    for ours, theirs in pairs:
        received = [TensorSpec.of(tensor).empty(torch.device("cpu")) for tensor in sent]
        Mover(torch.device("cpu")).receive(iter(received), Link(theirs), 0)
        for tensor, expected in zip(received, sent, strict=True):
            assert torch.equal(tensor, expected)
            assert (tensor.stride(), tensor.dtype) == (expected.stride(), expected.dtype)
        ours.close()
        assert not theirs.recv(1), "all that was sent is received"
        theirs.close()
