"""Tensors between a process and its workers: over NCCL where each has a GPU of its own, else over the link.

The link serves tensors on the host, and several processes on one GPU, between which NCCL does not connect.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from wanshim.core.ranks import nccl
from wanshim.core.ranks.group import Group

from .link import Link
from .packing import elements

_AT_ONCE = 64  # tensors in one group of NCCL's


def file_of_a_store() -> int:
    """The descriptor of a file without a name: who inherits it can join the store in it, and nobody else.

    It stays open: threads of NCCL's group may look into the store by this number for as long as the process lives.
    """
    return os.memfd_create("wanshim-workers")


class Mover:
    """One process's end. Tensors are sent and received in the same order at both ends.

    Args:
        device: of this process's modules.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peers: Any = None  # a NCCL group of all processes; None: everything goes over links

    @classmethod
    def over_nccl(cls, device: torch.device, file: int, rank: int, size: int, patience: float) -> Mover:
        """Connect; all processes call it at once.

        Raises:
            RuntimeError: they did not meet within `patience` seconds.
        """
        group = Group.of_file(file, "tensors", range(size), rank)
        mover = cls(device)
        mover._peers = group.connect("nccl", device, timedelta(seconds=patience), mover)
        return mover

    def send(self, tensors: Iterable[torch.Tensor], to: Mapping[int, Link]) -> None:
        """Send to the processes of these ranks. Work of the current stream that follows is ordered behind it."""
        by_nccl: list[torch.Tensor] = []
        for tensor in tensors:
            dense = elements(tensor).contiguous()
            if not dense.numel():
                continue
            if self._peers is not None and dense.is_cuda:
                by_nccl.append(_bytes(dense))
                if len(by_nccl) == _AT_ONCE:  # what was brought to the GPU for this goes again
                    self._in_groups(by_nccl, [(rank, self._peers.send) for rank in to])
                    by_nccl.clear()
                continue
            view = memoryview(_bytes(dense.cpu()).numpy())
            for link in to.values():
                link.send_bytes(view)
        self._in_groups(by_nccl, [(rank, self._peers.send) for rank in to] if by_nccl else [])

    def receive(self, tensors: Iterable[torch.Tensor], link: Link, rank: int) -> None:
        """Fill the tensors with what the process of this rank sent."""
        by_nccl, copies = [], []
        for tensor in tensors:
            place = elements(tensor)
            dense = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            if not dense.numel():
                continue
            if self._peers is not None and dense.is_cuda:
                by_nccl.append(_bytes(dense))
            else:
                dense = torch.empty_like(dense, device="cpu") if dense.is_cuda else dense
                link.receive_bytes(memoryview(_bytes(dense).numpy()))
            if dense is not place:
                copies.append((place, dense))
        self._in_groups(by_nccl, [(rank, self._peers.recv)] if by_nccl else [])
        for place, dense in copies:
            place.copy_(dense)

    def close(self) -> None:
        """Wake whoever waits in NCCL."""
        if self._peers is not None:
            nccl.abort(self._peers, idle=True)

    def _in_groups(self, tensors: Sequence[torch.Tensor], ends: Sequence[tuple[int, Any]]) -> None:
        for start in range(0, len(tensors), _AT_ONCE):
            self._peers._start_coalescing()
            for tensor in tensors[start : start + _AT_ONCE]:
                for rank, move in ends:
                    move([tensor], rank, 0)
            self._peers._end_coalescing().wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory: NCCL does not know every dtype."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
