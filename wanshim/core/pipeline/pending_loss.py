"""The loss of a micro-batch that is still on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class PendingLoss(torch.Tensor):  # type: ignore[misc]
    """A stand-in for a loss: whoever computes with it, prints it or asks for its value waits for the real one."""

    _value: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, value: Callable[[], torch.Tensor]) -> PendingLoss:
        loss = torch.Tensor._make_subclass(cls, torch.empty(()))
        loss._value = value
        return loss  # type: ignore[no-any-return]

    def __init__(self, value: Callable[[], torch.Tensor]) -> None: ...

    def wait(self) -> torch.Tensor:
        """The loss itself, detached."""
        return self._value()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(PendingLoss, PendingLoss.wait, (args, kwargs or {}))
        return func(*args, **kwargs)
