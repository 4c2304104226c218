"""Copies of a module without what was attached to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from wanshim.undo import Undo

Copier = Callable[[nn.Module, dict[int, Any]], nn.Module]  # a module and the memo of `copy.deepcopy`: its copy


def set_copier(module: nn.Module, copier: Copier, undo: Undo) -> None:
    """Let `copy.deepcopy` of the module or of a parent call `copier`, and pickle and `torch.save` store such a copy."""
    of_module = partial(copier, module)
    copies = {"__deepcopy__": of_module, "__reduce_ex__": lambda version: of_module({}).__reduce_ex__(version)}
    undo.set(module, copies, keep_foreign=True)


def detached_copy(
    module: nn.Module,
    memo: dict[int, Any],
    undos: Iterable[Undo],
    touched: Sequence[nn.Module],
    origins: Iterable[tuple[torch.Tensor, torch.device]] = (),
) -> nn.Module:
    """A deep copy of the module as if `undos` had been removed, while the module itself stays as it is.

    Args:
        memo: that of `copy.deepcopy`.
        undos: take back hooks and attributes, and move nothing.
        touched: the modules that `undos` change; none of them may run meanwhile.
        origins: tensors whose copies lie on other devices, or in a storage of their own.
    """
    memo.update((id(tensor), _copy_on(tensor, device)) for tensor, device in origins if id(tensor) not in memo)
    with _lifted(undos, touched):
        return copy.deepcopy(module, memo)


def _copy_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copied = tensor.detach().to(device, copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


@contextmanager
def _lifted(undos: Iterable[Undo], touched: Sequence[nn.Module]) -> Iterator[None]:
    """Without what `undos` take back; afterwards all of it is in its place again, hooks in their order."""
    attributes = [(vars(module), dict(vars(module))) for module in touched]
    hooks = [(d, dict(d)) for own, _ in attributes for name, d in own.items() if "_hooks" in name and d]
    for undo in undos:
        undo.run_steps()
    try:
        yield
    finally:
        for living, before in (*attributes, *hooks):
            living.clear()
            living.update(before)
