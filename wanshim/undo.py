"""Make a module keep its devices, whoever calls `.to` on it or on a parent."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

Undo = list[Callable[[], object]]  # what takes it back, to be called from the last to the first


def undo_all(undo: Undo) -> None:
    """Take everything back; afterwards there is nothing left to take back."""
    while undo:
        undo.pop()()


def anchor(module: nn.Module, undo: Undo) -> None:
    """From now on moves of the module or of a parent leave it where it is; dtype changes still apply."""
    set_attributes(module, {"_apply": types.MethodType(_apply_without_moving, module)}, undo)


def set_attributes(module: nn.Module, attributes: Mapping[str, Any], undo: Undo) -> None:
    """Set attributes of the object itself, past `nn.Module.__setattr__`."""
    for attribute, value in attributes.items():
        undo.append(partial(_put_back, vars(module), attribute, vars(module).get(attribute, _ABSENT)))
        vars(module)[attribute] = value


_ABSENT = object()


def _put_back(namespace: dict[str, Any], name: str, value: object) -> None:
    if value is _ABSENT:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def _apply_without_moving(
    self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    """`Module._apply` for a model that is split: dtype and layout changes pass, moves do not.

    What `fn` would do is tried on one element of the same kind first, so that nothing big ever crosses.
    """
    outcome: dict[tuple[torch.dtype, torch.device, int], torch.Tensor] = {}

    def stay(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return fn(tensor)
        key = (tensor.dtype, tensor.device, tensor.dim())
        if key not in outcome:
            outcome[key] = fn(torch.empty((1,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device))
        if outcome[key].device == tensor.device:
            return fn(tensor)
        return tensor.to(dtype=outcome[key].dtype)

    return type(self)._apply(self, stay, *args, **kwargs)
