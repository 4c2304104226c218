"""Models that a script offloads, computed in its process from a copy in host memory in place of that offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from wanshim.core.streaming import HostCopy, bytes_when_streamed, compute_from
from wanshim.core.streaming.host_copy import Moved
from wanshim.core.streaming.page_locked import PageLocked
from wanshim.core.streaming.ring import Waits, waits_on
from wanshim.undo import Undo

from .binding import Forward, PipelineBinding

# A copy holds the memory of its model's weights: it stays from call to call.
_COPIES: WeakKeyDictionary[nn.Module, HostCopy] = WeakKeyDictionary()


def host_copy(model: nn.Module, *, shared: bool, moved: Moved = lambda weights: None) -> HostCopy:
    """The copy of a model as its classes made it, without hooks.

    Args:
        shared: for other processes too.
        moved: as of `HostCopy.of`.

    Raises:
        PlacementInvalid: no block has weights that can lie there.
        HostMemoryInvalid: the host has not that much memory.
    """
    known = _COPIES.get(model)
    if known is None or known.layouts(model) is None or (shared and not known.descriptors):
        if known is not None:
            _COPIES.pop(model).settle()
        known = _COPIES[model] = HostCopy.of(model, shared=shared, moved=moved)
    return known


def weights_on_host(model: nn.Module, *, shared: bool, moved: Moved) -> HostCopy | PageLocked:
    """The weights themselves, where an offload keeps them page-locked and no other process needs them; else
    `host_copy`."""
    if not shared and model not in _COPIES and PageLocked().layouts(model) is not None:
        return PageLocked()
    return host_copy(model, shared=shared, moved=moved)


def wait_for(model: nn.Module, copy: HostCopy | PageLocked) -> None:
    """Wait until the weights have come. If a block fails to, the others come, and another copy takes this one's place.

    Raises:
        HostMemoryInvalid: the host has not that much memory.
    """
    try:
        copy.wait()
    except BaseException:
        settle(model, copy)
        raise


def settle(model: nn.Module, copy: HostCopy | PageLocked) -> bool:
    """Wait until no weight is on its way; whether all have come. A block that failed to stays where it was, and another
    copy takes its place."""
    have_come = copy.settle()
    if not have_come:
        _COPIES.pop(model, None)
    return have_come


class OwnStreams:
    """Streams of one call of a pipeline, of the models of one forward at a time.

    Args:
        binding: of the call.
        device: on which they compute.
        without_replacements: a context in which the script's objects have nothing of this call.
        placed: what is replaced, for that context: the last of each entry is what the script has there.
        may_keep, on_kept: of a model, and as of `Waits`.
    """

    def __init__(
        self,
        binding: PipelineBinding,
        device: torch.device,
        without_replacements: Callable[[], AbstractContextManager[object]],
        placed: list[tuple[Any, str, Any, dict[str, Any]]],
        may_keep: Callable[[nn.Module, int, int], int],
        on_kept: Callable[[], None],
    ) -> None:
        self._binding, self._device, self._placed = binding, device, placed
        self._may_keep, self._on_kept = may_keep, on_kept
        self._waits: list[Waits] = []
        self._without_replacements = without_replacements
        self._attached = Undo()
        self._models: list[nn.Module] = []
        self._brought: list[tuple[nn.Module, HostCopy | PageLocked | None]] = []
        self._are_streamed = False

    def bring(self, models: list[nn.Module], *, shared: bool) -> list[tuple[nn.Module, HostCopy | PageLocked | None]]:
        """Take these models, and no others, from the script's offload, and have their weights on the way to where
        they are streamed from.

        Args:
            shared: workers stream them too.

        Returns:
            Those that the offload has let go, and the copy of each; None: all of that model comes to the device.

        Raises:
            PlacementInvalid, HostMemoryInvalid: as `host_copy`.
        """
        if [*map(id, models)] != [*map(id, self._models)]:
            self.end()
            self._models = models
            for module in models:
                self._bring(module, shared)
        return self._brought

    def begin(
        self, forward: Forward, models: list[nn.Module], *, shared: bool, coming: Sequence[HostCopy | PageLocked] = ()
    ) -> Callable[..., Any]:
        """Stream the models of a forward.

        Args:
            shared: as of `bring`.
            coming: copies for which the caller waits.

        Returns:
            The function that computes it.

        Raises:
            PlacementInvalid, HostMemoryInvalid, torch.OutOfMemoryError: as `bring` and `compute_from`.
        """
        brought = self.bring(models, shared=shared)
        if not self._are_streamed:
            for module, copy in brought if shared else ():
                if copy is not None and copy not in coming:  # a failure must come here: workers compute in a forward
                    wait_for(module, copy)
            self._are_streamed = True
            for module, copy in brought:
                self._attach(module, copy)
        owner, name = forward.owner, forward.attribute
        if any(owner is model for model in models):
            return getattr(type(owner), name).__get__(owner)
        with self._without_replacements():
            return getattr(owner, name)

    def end(self) -> None:
        """Give the models back to the script's offload. Safe to call twice."""
        models, self._models = self._models, []
        self._brought, self._waits, self._are_streamed = [], [], False
        try:
            if models:
                with self._without_replacements():
                    self._attached.remove()
        finally:
            if models and self._device.type == "cuda":  # what comes next needs it in one piece
                torch.cuda.empty_cache()
            if self._binding.offload is not None and not self._binding.offload.keeps:
                for model in models:
                    _COPIES.pop(model, None)

    def time_anew(self) -> None:
        """The forwards until now were none of the loop's, but a comparison's of a few tokens."""
        for waits in self._waits:
            waits.begin_anew()

    def _bring(self, module: nn.Module, shared: bool) -> None:
        offload = self._binding.offload
        assert offload is not None
        moved = offload.before(module)
        if moved is None:
            return
        with self._without_replacements():
            bare = ExitStack()
            self._attached.add(bare.close)
            bare.enter_context(self._binding.without_hooks(module))
            for owner, _, _, own in self._placed:
                if owner is module:  # until then, what the script has there are hooks, which are off
                    self._attached.add(partial(own.update, dict(own)))
                    own.clear()
            copy: HostCopy | PageLocked | None = None
            if bytes_when_streamed(module) is not None:
                copy = weights_on_host(module, shared=shared, moved=moved)
                self._attached.add(partial(settle, module, copy))
            self._brought.append((module, copy))

    def _attach(self, module: nn.Module, copy: HostCopy | PageLocked | None) -> None:
        with self._without_replacements():
            waits = waits_on(self._device, partial(self._may_keep, module), self._on_kept)
            self._waits += [] if waits is None else [waits]
            streams = compute_from(copy, module, self._device, waits)
            self._attached.add(streams.remove)
            self._attached.set(module, {"_apply": self._ending(module)})

    def _ending(self, module: nn.Module) -> Callable[..., nn.Module]:
        """A `Module._apply` before which the stream ends: who moves the model, as the offload of the next one does, has
        no more forward of it in view."""

        def apply(*args: Any, **kwargs: Any) -> nn.Module:
            self.end()
            return module._apply(*args, **kwargs)

        return apply
