"""A model that all ranks of a host load: one rank reads its files, and all have its weights from one copy.

The copy is mapped privately: a rank that writes to a weight gets pages of its own, and no other rank sees it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wanshim.core.ranks.group import Group
from wanshim.core.streaming.shared_memory import Shared, allocate
from wanshim.errors import WanshimError

ALIGNMENT = 64  # bytes
WAIT_S = 1800.0  # for one rank to read the model's files
TOPIC, _CALL = "wanshim/weights", "load_once"
Entry = tuple[str, str, list[int]]  # name, dtype as torch writes it without "torch.", shape


def load_once(
    host: Group, load: Callable[[], nn.Module], load_from: Callable[[Mapping[str, torch.Tensor]], nn.Module]
) -> tuple[nn.Module, str]:
    """A model with its weights in memory that the ranks of the host share, and why they are not shared, or nothing.
    All ranks of the host call this in the same order.

    Args:
        load: reads the files; called on the first rank, and on the others where weights cannot be shared.
        load_from: makes the model from its state, without the files.

    Raises:
        RanksFailed: the first rank did not load it, or another rank failed.
    """
    model: nn.Module | None = None
    layout: list[Entry] = []
    reason = ""
    with host.failing_together(TOPIC, WAIT_S, _CALL):
        if host.rank == 0:
            model = load()
            state = model.state_dict()
            reason = _why_not_shared(state)
            layout = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in state.items()]
            del state
    reason, layout = host.gather(TOPIC, [reason, [] if reason else layout], WAIT_S, _CALL)[0]
    if not reason:
        try:
            shared = allocate(_size(layout), host, _CALL, private=True)
        except WanshimError as error:
            reason = error.found
    if reason:
        return (load() if model is None else model), reason
    try:
        if model is not None:
            _share(model, layout, shared)
    except BaseException as error:
        shared.abandon(error)
        raise
    shared.meet()
    return (load_from(dict(_views(shared.memory, layout))) if model is None else model), ""


def _share(model: nn.Module, layout: list[Entry], shared: Shared) -> None:
    """Write the weights of the first rank's model, which has them from there from now on."""
    assert shared.writable is not None  # of the first rank
    state = model.state_dict()
    for name, view in _views(shared.writable, layout):
        view.copy_(state[name])
    del state
    model.load_state_dict(dict(_views(shared.memory, layout)), assign=True)
    _give_back_freed()


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
