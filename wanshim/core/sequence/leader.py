"""What the first rank of a group makes, on all ranks: the outputs of a text encoder or VAE, random states, a meeting.

Nothing is pickled: the structure travels as JSON through the store, the bytes of tensors through the group's exchange.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .attendance import Attendance
from .group import SequenceGroup

T = TypeVar("T")


class Unshareable(TypeError):
    """A value that is neither a tensor without a gradient nor JSON's, nor made of such."""


class Leader:
    """The first rank of a group, as every rank of it sees it. All ranks make the same calls in the same order."""

    def __init__(self, group: SequenceGroup, attendance: Attendance) -> None:
        self._group, self._attendance = group, attendance
        self._calls = 0

    def share(self, make: Callable[[], T], device: torch.device) -> T:
        """The result of `make()` on the first rank, on every rank.

        Args:
            make: called on the first rank; where its result cannot travel, on every rank. The result is made of dicts
                with strings as keys, lists, tuples, tensors without a gradient, numbers, strings and None.
            device: of the group's exchange, and of received tensors that are not on the CPU.

        Raises:
            SequenceFailed: on the other ranks, with the name of what `make()` raised on the first.
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
            tensors: list[torch.Tensor] = []
            try:
                described = _described(made, tensors)
            except Unshareable:
                group.publish(key, json.dumps({"own": True}))
                return made
            group.publish(key, json.dumps({"made": described}))
            for tensor in tensors:
                group.send_from_first(tensor.detach().to(device))
            return made
        found = json.loads(group.published(key, f"what rank {group.ranks[0]} makes for the group"))
        if "own" in found:
            return make()
        return _rebuilt(found["made"], lambda shape, dtype: group.receive_from_first(shape, dtype, device))

    def agrees(self, text: str) -> bool:
        """Whether every rank gives the same text."""
        self._attendance.join("a comparison")
        return len(set(self._group.gather_text("compared", text))) == 1

    def meet(self, seconds: float) -> bool:
        """Return when every rank has called this, or is further on: whether all have. Raise what stopped the group
        meanwhile."""
        return self._attendance.meet(seconds)


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value in JSON's terms, its tensors appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad or type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_sparse:
            raise Unshareable
        tensors.append(value)
        return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type == "cpu"]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return [type(value).__name__, [_described(item, tensors) for item in value]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", {key: _described(item, tensors) for key, item in value.items()}]
    raise Unshareable(type(value).__name__)


def _rebuilt(described: Any, receive: Callable[[list[int], torch.dtype], torch.Tensor]) -> Any:
    kind, content = described[0], described[1]
    if kind == "tensor":
        tensor = receive(content, getattr(torch, described[2]))
        return tensor.cpu() if described[3] else tensor
    if kind == "dict":
        return {key: _rebuilt(item, receive) for key, item in content.items()}
    if kind in ("list", "tuple"):
        items = [_rebuilt(item, receive) for item in content]
        return tuple(items) if kind == "tuple" else items
    return content
