"""The placement of side models that do not fit beside the first stage of a split model: to the device with most memory
left, or to the host, from where they come for each call.

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

from wanshim.core.model_split.pin import pin
from wanshim.core.model_split.plan import format_bytes
from wanshim.core.shared.weight_bytes import tensors
from wanshim.undo import Undo

HOST = "host"
_MOVED = "_wanshim_moved_to"


def choose_devices(
    sizes: Mapping[str, int], peaks: Mapping[str, int], available: Mapping[str, int], home: str, calling: int
) -> dict[str, str]:
    """The side models that leave `home`, and where each goes: another device, or HOST.

    The largest leaves first, until the rest fits. A device that is not in `available` has no limit.

    Args:
        sizes: bytes by name; they lie on `home`.
        peaks: predicted bytes of each device without them.
        calling: bytes on `home` while one of them is called, without them.
    """
    if home not in available:
        return {}
    left = {device: available[device] - peak for device, peak in peaks.items() if device in available}
    here = dict(sizes)
    leaving: dict[str, str] = {}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if sum(here.values()) <= left[home]:
            break
        others = [device for device in peaks if device != home]
        most = max(others, key=lambda device: left.get(device, size), default=home)
        if most != home and left.get(most, size) >= size:
            leaving[name] = most
            if most in left:
                left[most] -= size
        elif calling + size <= available[home]:
            leaving[name] = HOST
        else:
            continue
        del here[name]
    return leaving


def describe_move(
    name: str, moves: Mapping[str, str], sizes: Mapping[str, int], peaks: Mapping[str, int],
    available: Mapping[str, int], home: str,
) -> str:  # fmt: skip
    """A sentence on the device that `choose_devices` gave one side model, with the reason."""
    device = moves[name]
    where = f"waits in host memory and is copied to {home} for each call" if device == HOST else f"computes on {device}"
    return (
        f"{name} ({format_bytes(sizes[name])}) {where}, with the same bits: beside it {home} would need "
        f"{format_bytes(peaks[home] + sum(sizes.values()))} of {format_bytes(available[home])}"
    )


def move_side_model(model: nn.Module, device: str, home: str | torch.device, calls: Sequence[str]) -> None:
    """Move a frozen model to `device` and pin it there against any later move of it or of a parent.

    Its callers notice nothing: tensors and devices it is called with are brought to where it computes, and tensors
    it returns, also those in tuples, lists and dicts, go back to `home`.

    Args:
        device: one that it computes on; or HOST, from where its weights come to `home` for each call. They do not
            change, so nothing is copied back.
        calls: its methods that are called from outside.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """
    undo = Undo()  # nobody takes it back
    computes_on = torch.device(home if device == HOST else device)
    model.to("cpu" if device == HOST else computes_on)
    methods = {name: _bridged(getattr(model, name), computes_on, home) for name in calls if hasattr(model, name)}
    if device == HOST:
        around = _visit(model, computes_on)
        methods = {name: around(method) for name, method in methods.items()}
    undo.set(model, {**methods, _MOVED: device})
    pin(model, undo)


def moved_to(model: nn.Module) -> str | None:
    """The device to which a side model was moved, or None for one that was not."""
    return vars(model).get(_MOVED)


def can_visit(model: nn.Module) -> bool:
    """Whether a model's weights can come and go: they are plain tensors."""
    return not any(map(is_traceable_wrapper_subclass, tensors(model)))


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


def _bridged(method: Callable[..., Any], computes_on: torch.device, home: str | torch.device) -> Callable[..., Any]:
    def bring(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(computes_on)
        return computes_on if isinstance(value, torch.device) else value

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_host = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        back = torch.device("cpu") if on_host and all(leaf.device.type == "cpu" for leaf in on_host) else home
        if "device" in kwargs:
            kwargs["device"], back = computes_on, home
        result = method(*tree_map(bring, args), **tree_map(bring, kwargs))
        return tree_map(lambda value: value.to(back) if isinstance(value, torch.Tensor) else value, result)

    return call
