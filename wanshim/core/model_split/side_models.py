"""Where the models beside a split one go when they would not fit beside its first stage: on the device with most room,
or on the host, from where they come for each call.

Both give the bits that they give on the first device: they compute on a device of the same kind, with the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from wanshim.core.shared.weight_bytes import num_bytes, tensors
from wanshim.undo import Undo, anchor, set_attributes

HOST = "host"
_PLACE = "_wanshim_lodging"


def find_lodging(
    guests: Mapping[str, int], peaks: Mapping[str, int], available: Mapping[str, int], home: str, calling: int
) -> dict[str, str]:
    """The guests that leave `home`, and where to: another device, or HOST.

    The largest leaves first, until the rest fits. A device that is not in `available` has no limit.

    Args:
        guests: bytes by name; they lie on `home`.
        peaks: predicted bytes of each device without guests.
        calling: bytes on `home` while a guest is called, without guests.
    """
    if home not in available:
        return {}
    room = {device: available[device] - peak for device, peak in peaks.items() if device in available}
    here = dict(guests)
    leaving: dict[str, str] = {}
    for name, size in sorted(guests.items(), key=lambda item: -item[1]):
        if sum(here.values()) <= room[home]:
            break
        others = [device for device in peaks if device != home]
        most = max(others, key=lambda device: room.get(device, size), default=home)
        if most != home and room.get(most, size) >= size:
            leaving[name] = most
            if most in room:
                room[most] -= size
        elif calling + size <= available[home]:
            leaving[name] = HOST
        else:
            continue
        del here[name]
    return leaving


def lodge(model: nn.Module, place: str, home: str | torch.device, calls: Sequence[str]) -> None:
    """Put a frozen model on `place` and keep it there against any later move of it or of a parent.

    Its callers notice nothing: tensors and devices it is called with are brought to where it computes, and tensors
    it returns, also those in tuples, lists and dicts, go back to `home`.

    Args:
        place: a device it lies and computes on; or HOST, from where its weights come to `home` for each call. They
            do not change, so nothing is copied back.
        calls: its methods that are called from outside.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """
    undo: Undo = []  # nobody takes it back
    works_on = torch.device(home if place == HOST else place)
    model.to("cpu" if place == HOST else works_on)
    around = _visit(model, works_on) if place == HOST else _stay
    methods = {name: getattr(model, name) for name in calls if hasattr(model, name)}
    set_attributes(model, {name: around(_bridged(m, works_on, home)) for name, m in methods.items()}, undo)
    set_attributes(model, {_PLACE: place}, undo)
    anchor(model, undo)


def lodging_of(model: nn.Module) -> str | None:
    """Where a model is lodged, or None for one that is not."""
    return vars(model).get(_PLACE)


def can_visit(model: nn.Module) -> bool:
    """Whether a model's weights can come and go: they are plain tensors."""
    return not any(map(is_traceable_wrapper_subclass, tensors(model)))


def lodged_bytes(models: Sequence[nn.Module], device: str) -> int:
    return sum(num_bytes(model) for model in models if lodging_of(model) == device)


def _stay(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


def _visit(model: nn.Module, device: torch.device) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    depth = 0

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            stored = [(t, t.data) for t in tensors(model)] if depth == 0 else []
            depth += 1
            try:
                for tensor, data in stored:
                    tensor.data = data.to(device)
                return method(*args, **kwargs)
            finally:
                depth -= 1
                for tensor, data in stored:
                    tensor.data = data

        return call

    return around


def _bridged(method: Callable[..., Any], works_on: torch.device, home: str | torch.device) -> Callable[..., Any]:
    def bring(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(works_on)
        return works_on if isinstance(value, torch.device) else value

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_host = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        back = torch.device("cpu") if on_host and all(leaf.device.type == "cpu" for leaf in on_host) else home
        if "device" in kwargs:
            kwargs["device"], back = works_on, home
        result = method(*tree_map(bring, args), **tree_map(bring, kwargs))
        return tree_map(lambda value: value.to(back) if isinstance(value, torch.Tensor) else value, result)

    return call
