"""Keep a model on a device of its own, whoever calls `.to` on it or on a parent."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from wanshim.core.shared.copies import Copier, detached_copy, set_copier
from wanshim.undo import Undo


def pin(module: nn.Module, undo: Undo, copier: Copier | None = None) -> None:
    """From now on moves of the module or of a parent leave it where it is; dtype changes still apply.

    Args:
        copier: makes its copies, as in `set_copier`; default: without what `undo` takes back by the time of the copy.
    """
    undo.set(module, {"_apply": types.MethodType(_apply_without_moving, module)})
    set_copier(module, copier or (lambda module, memo: detached_copy(module, memo, [undo], [module])), undo)


def pin_to(model: nn.Module, device: str | torch.device) -> Undo:
    """Move `model` to `device` and pin it there, while the rest of its program is elsewhere.

    Its callers notice nothing: the tensors it is called with are brought to it, and a tensor it returns, also
    one in a tuple, list or dict, goes back to the device the first of them came from.

    Returns:
        What lets the model go again, where it is.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """
    here = torch.device(device)
    model.to(here)
    undo = Undo()
    came_from: list[torch.device] = []

    def bring(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        came_from[:] = [tensors[0].device] if tensors else []
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(here), (args, kwargs))

    def bring_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not came_from or came_from[0] == here:
            return None
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(came_from[0]), output)

    undo.add(model.register_forward_pre_hook(bring, with_kwargs=True).remove)
    undo.add(model.register_forward_hook(bring_back).remove)
    pin(model, undo)
    return undo


def _apply_without_moving(
    self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    """`Module._apply` for a pinned model: dtype and layout changes pass, moves do not.

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
