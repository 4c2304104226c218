"""Results of the first rank of a group, on all ranks: the outputs of a text encoder or VAE, random states.

Nothing is pickled: the structure travels as JSON through the store, the bytes of tensors through the group's exchange.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch

from wanshim.core.shared.tree import NotFlat, flatten, rebuild

from .attendance import Attendance
from .group import SequenceGroup

T = TypeVar("T")


class Leader:
    """The first rank of a group, as every rank of it sees it. All ranks make the same calls in the same order."""

    def __init__(self, group: SequenceGroup, attendance: Attendance) -> None:
        self._group, self._attendance = group, attendance
        self._calls = 0

    def share(self, make: Callable[[], T], device: torch.device) -> T:
        """The result of `make()` on the first rank, on every rank.

        Args:
            make: called on the first rank; where its result cannot travel, on every rank. The result is made of dicts
                with strings or numbers as keys, lists, tuples, tensors without a gradient, numbers, strings and None.
            device: of the group's exchange, and of received tensors that are not on the CPU.

        Raises:
            RanksFailed: on the other ranks, with the name of what `make()` raised on the first.
        """
        group, self._calls = self._group, self._calls + 1
        self._attendance.join("what the first rank makes for the group")
        key = f"shared/{self._calls}"
        if group.rank == 0:
            try:
                made = make()
            except BaseException as error:
                group.watch.fail_with(error)
                raise
            tensors: dict[str, torch.Tensor] = {}
            try:
                described = flatten(made, "made", tensors)
                travels = not any(tensor.requires_grad for tensor in tensors.values())
            except NotFlat:
                travels = False
            if not travels:
                group.publish(key, json.dumps({"own": True}))
                return made
            dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
            sent = [[name, list(tensor.shape), dtypes[name]] for name, tensor in tensors.items()]
            group.publish(key, json.dumps({"made": described, "tensors": sent}))
            for tensor in tensors.values():
                group.from_first(tensor.detach().to(device))
            return made
        found = json.loads(group.published(key, f"what rank {group.ranks[0]} makes for the group"))
        if "own" in found:
            return make()
        received = {
            name: group.from_first(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
            for name, shape, dtype in found["tensors"]
        }
        return rebuild(found["made"], lambda at: received[at["tensor"]].cpu() if at["cpu"] else received[at["tensor"]])

    def agrees(self, text: str) -> bool:
        """Whether every rank gives the same text."""
        self._attendance.join("a comparison")
        return len(set(self._group.gather_text("compared", text))) == 1
