"""A model that all ranks of a host load: one rank reads its files, and all have its weights from one copy.

The copy is mapped privately: a rank that writes to a weight gets pages of its own, and no other rank sees it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wanshim.core.ranks.store import wait_for
from wanshim.core.streaming.shared_memory import LocalRanks, allocate
from wanshim.errors import WanshimError

ALIGNMENT = 64  # bytes
WRITTEN = "written"
Entry = tuple[str, str, list[int]]  # name, dtype as torch writes it without "torch.", shape

_loads = 0


def load_once(
    host: LocalRanks, load: Callable[[], nn.Module], load_from: Callable[[Mapping[str, torch.Tensor]], nn.Module]
) -> tuple[nn.Module, str]:
    """A model with its weights in memory that the ranks of the host share, and why they are not shared, or nothing.
    All ranks of the host call this in the same order.

    Args:
        load: reads the files; called on the first rank, and on the others where weights cannot be shared.
        load_from: makes the model from its state, without the files.

    Raises:
        WanshimError: the first rank did not load it.
    """
    global _loads
    _loads += 1
    key = f"wanshim/weights/{host.name}/{_loads}"
    if host.local_rank == 0:
        return _share(host, key, load)
    if not wait_for(host.store, [key], host.timeout_s):
        raise WanshimError(
            f"local rank 0 of {host.shown} did not load the model in {host.timeout_s:.0f} s",
            hint="Look for the first error in its log",
        )
    found = json.loads(host.store.get(key))
    if "error" in found:
        raise WanshimError(f"local rank 0 of {host.shown} could not load the model: {found['error']}")
    if found["why_not"]:
        return load(), found["why_not"]
    try:
        shared = allocate(_size(found["layout"]), host, private=True)
    except WanshimError as error:
        return load(), error.found
    shared.meet(WRITTEN)
    return load_from(dict(_views(shared.memory, found["layout"]))), ""


def _share(host: LocalRanks, key: str, load: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
    try:
        model = load()
        state = model.state_dict()
        reason = _why_not_shared(state)
        layout = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in state.items()]
    except BaseException as error:
        host.store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    host.store.set(key, json.dumps({"why_not": reason, "layout": [] if reason else layout}))
    if reason:
        return model, reason
    try:
        shared = allocate(_size(layout), host, private=True)
    except WanshimError as error:
        return model, error.found
    try:
        assert shared.writable is not None  # of the first rank
        for name, view in _views(shared.writable, layout):
            view.copy_(state[name])
        del state
        model.load_state_dict(dict(_views(shared.memory, layout)), assign=True)
        _give_back_freed()
    except BaseException as error:
        shared.abandon(error)
        raise
    shared.meet(WRITTEN)
    return model, ""


def _give_back_freed() -> None:
    """Return freed memory to the system: glibc keeps blocks of less than 32 MiB, which most weights are."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _why_not_shared(state: Mapping[str, Any]) -> str:
    """Why these tensors are not shared, or nothing."""
    tensors = list(state.values())
    if not tensors:
        return "the model has no weights"
    if not all(isinstance(t, torch.Tensor) and not is_traceable_wrapper_subclass(t) for t in tensors):
        return "a quantised weight is more than its bytes"
    if any(t.device.type != "cpu" for t in tensors):
        return "weights are not in host memory"
    if len({t.untyped_storage().data_ptr() for t in tensors if t.numel()}) < sum(1 for t in tensors if t.numel()):
        return "two names have the same weight"
    return ""


def _views(memory: torch.Tensor, layout: list[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    for (name, dtype, shape), (begin, end) in zip(layout, _bounds(layout), strict=True):
        yield name, memory[begin:end].view(getattr(torch, dtype)).view(shape)


def _bounds(layout: list[Entry]) -> Iterator[tuple[int, int]]:
    begin = 0
    for _, dtype, shape in layout:
        end = begin + prod(shape) * getattr(torch, dtype).itemsize
        yield begin, end
        begin = -(-end // ALIGNMENT) * ALIGNMENT


def _size(layout: list[Entry]) -> int:
    return max(end for _, end in _bounds(layout))
