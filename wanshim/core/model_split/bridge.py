"""Bring the tensors a block is called with to the block's device, each at most once.

A text's embedding, a timestep's modulation and positions are the same tensors for every block of a transformer:
they cross once per device and micro-batch, not once per block. What crosses is remembered as long as the
source tensor lives.

What needs a gradient travels from stage to stage, so that its gradient comes back the same way: the sum of a stage is
where the stage before begins, as in the unsplit model. Sums made apart and added at home round differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Bridge:
    """The way onto one device, for tensors with a gradient `via` the bridge onto the device of the stage before.

    Only tensors on another device of the same kind cross. CPU tensors stay (a block that wants its
    `grid_sizes` on the host keeps them there), and lists and dicts are handed through untouched: a block may
    write into them. Crossing is differentiable.
    """

    def __init__(self, device: torch.device, via: Bridge | None = None) -> None:
        self.device = device
        self.via = via
        self._crossed = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, such as one of a block with its hooks, has not carried anything yet."""
        return type(self), (self.device, self.via)

    def needed(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device != self.device and value.device.type == self.device.type

    def _holds_needed(self, value: Any) -> bool:
        """Whether a tuple, or one within it, has a tensor that must cross."""
        if not isinstance(value, tuple):
            return False
        return any(self.needed(item) or self._holds_needed(item) for item in value)

    def cross(self, value: Any) -> Any:
        """A tensor, or a tuple of them at any depth, on this device; the same object where it is there already."""
        if self._holds_needed(value):
            items = [self.cross(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value.to(self.device, non_blocking=True) if self.needed(value) else value

    def cross_once(self, value: Any) -> Any:
        """As `cross`, remembering the copy of each source tensor."""
        if self._holds_needed(value):
            items = [self.cross_once(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not self.needed(value):
            return value
        if value.is_inference():  # has no version that shows a change
            return self.cross(value)
        tracked = value.requires_grad and torch.is_grad_enabled()
        known = self._crossed.get(value)
        if known is None or known[0] != value._version or known[1] is not tracked:
            nearest = self.via.cross_once(value) if tracked and self.via is not None else value
            known = (value._version, tracked, self.cross(nearest))
            self._crossed[value] = known
        return known[2]

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook: inputs to the device. Fires again when a checkpoint recomputes the block."""
        return (
            tuple(self.cross_once(arg) for arg in args),
            {name: self.cross_once(value) for name, value in kwargs.items()},
        )
