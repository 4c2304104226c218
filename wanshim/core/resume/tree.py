"""State dicts of optimizers and schedules as JSON and named tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from wanshim.errors import ResumeInvalid


def flatten(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON, its tensors put into `tensors` under names that begin with `name`.

    Raises:
        ResumeInvalid: it holds something that is neither a tensor nor made of numbers, strings, lists and dicts.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_sparse:
            raise ResumeInvalid(f"{name} is a {type(value).__name__}", expected="a dense tensor")
        tensors[name] = value
        return {"tensor": name, "cpu": value.device.type == "cpu"}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [flatten(item, f"{name}.{place}", tensors) for place, item in enumerate(value)]
        return {type(value).__name__: items}
    if isinstance(value, dict):
        return {"dict": [[key, flatten(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    raise ResumeInvalid(f"{name} is a {type(value).__name__}", expected="a tensor, number, string, list or dict")


def rebuild(described: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `flatten` was given, its tensors on the CPU."""
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        return tensors[described["tensor"]]
    if "dict" in described:
        return {key: rebuild(item, tensors) for key, item in described["dict"]}
    ((kind, items),) = described.items()
    rebuilt = [rebuild(item, tensors) for item in items]
    return tuple(rebuilt) if kind == "tuple" else rebuilt


def restore_optimizer(optimizer: torch.optim.Optimizer, described: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load a flattened `state_dict()`. torch casts what it loads to the parameters' dtype and device; here each tensor
    has its own dtype again, and is on the CPU if it was."""
    saved = rebuild(described, tensors)
    optimizer.load_state_dict(saved)
    described_state = dict(dict(described["dict"])["state"]["dict"])
    numbered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in saved["state"].items():
        parameter = numbered[number]
        for name, place in described_state[number]["dict"]:
            if isinstance(place, dict) and "tensor" in place:
                device = torch.device("cpu") if place["cpu"] else parameter.device
                optimizer.state[parameter][name] = values[name].to(device, copy=True)
