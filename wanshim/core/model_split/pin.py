"""Keep a model on a device of its own, the host for instance, while the rest of its program is elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from wanshim.undo import Undo, anchor, undo_all


class KeepHandle:
    """A model that stays. `remove()` lets it go again, where it is; safe to call twice."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._undo: Undo = []

    def remove(self) -> None:
        undo_all(self._undo)


def keep_on(model: nn.Module, device: str | torch.device) -> KeepHandle:
    """Move `model` to `device` and keep it there against any later move of it or of a parent.

    Its callers notice nothing: the tensors it is called with are brought to it, and a tensor it returns, also
    one in a tuple, list or dict, goes back to the device the first of them came from.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """
    handle = KeepHandle(model.to(device), torch.device(device))
    came_from: list[torch.device] = []

    def bring(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        came_from[:] = [tensors[0].device] if tensors else []
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(handle.device), (args, kwargs))

    def bring_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not came_from or came_from[0] == handle.device:
            return None
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(came_from[0]), output)

    handle._undo.append(model.register_forward_pre_hook(bring, with_kwargs=True).remove)
    handle._undo.append(model.register_forward_hook(bring_back).remove)
    anchor(model, handle._undo)
    return handle
