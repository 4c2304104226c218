"""Models that a script offloads, computed in its process from a copy in host memory in place of that offload."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from wanshim.core.streaming import HostCopy, compute_from
from wanshim.undo import Undo

from .binding import Forward, PipelineBinding

# A copy holds the memory of its model's weights: it stays from call to call.
_COPIES: WeakKeyDictionary[nn.Module, HostCopy] = WeakKeyDictionary()


def host_copy(model: nn.Module) -> HostCopy:
    """The copy of a model as its classes made it, without hooks.

    Raises:
        PlacementInvalid: no block has weights that can lie there.
        HostMemoryInvalid: the host has not that much memory.
    """
    known = _COPIES.get(model)
    if known is None or known.layouts(model) is None:
        _COPIES.pop(model, None)
        known = _COPIES[model] = HostCopy.of(model)
    return known


class OwnStreams:
    """Streams of one call of a pipeline, of the models of one forward at a time.

    Args:
        binding: of the call.
        device: on which they compute.
        without_replacements: a context in which the script's objects have nothing of this call.
        placed: what is replaced, for that context: the last of each entry is what the script has there.
    """

    def __init__(
        self,
        binding: PipelineBinding,
        device: torch.device,
        without_replacements: Callable[[], AbstractContextManager[object]],
        placed: list[tuple[Any, str, Any, dict[str, Any]]],
    ) -> None:
        self._binding, self._device, self._placed = binding, device, placed
        self._without_replacements = without_replacements
        self._attached = Undo()
        self._forward: Forward | None = None

    def begin(self, forward: Forward) -> Callable[..., Any]:
        """Stream the models of a forward, and those of no other.

        Returns:
            The function that computes it.

        Raises:
            PlacementInvalid, HostMemoryInvalid, torch.OutOfMemoryError: as `host_copy` and `compute_from`.
        """
        if self._forward is not forward:
            self.end()
            self._forward = forward
            for module in forward.modules.values():
                self._attach(module)
        return getattr(type(forward.owner), forward.attribute).__get__(forward.owner)

    def end(self) -> None:
        """Give the models back to the script's offload. Safe to call twice."""
        if self._forward is not None:
            self._forward = None
            with self._without_replacements():
                self._attached.remove()

    def _attach(self, module: nn.Module) -> None:
        offload = self._binding.offload
        assert offload is not None
        moved = offload.before(module)
        with self._without_replacements():
            bare = ExitStack()
            self._attached.add(bare.close)
            bare.enter_context(self._binding.without_hooks(module))
            for owner, _, _, own in self._placed:
                if owner is module:  # until then, what the script has there are hooks, which are off
                    self._attached.add(lambda own=own, before=dict(own): own.update(before))
                    own.clear()
            copy = host_copy(module)
            moved()
            streams = compute_from(copy, module, self._device)
            self._attached.add(streams.remove)
            self._attached.set(module, {"_apply": self._ending(module)})

    def _ending(self, module: nn.Module) -> Callable[..., nn.Module]:
        """A `Module._apply` before which the stream ends: who moves the model, as the offload of the next one does, has
        no more forward of it in view."""

        def apply(*args: Any, **kwargs: Any) -> nn.Module:
            self.end()
            return module._apply(*args, **kwargs)

        return apply
