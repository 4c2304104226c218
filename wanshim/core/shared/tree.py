"""Values made of dense tensors and of what JSON has, as JSON and named tensors, and back. Nothing is pickled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


class NotFlat(TypeError):
    """A value that is neither a dense tensor nor made of numbers, strings, lists and dicts.

    Args:
        name: its place in the whole value.
    """

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"{name} is a {type(value).__name__}")
        is_tensor = isinstance(value, torch.Tensor)
        self.expected = "a dense tensor" if is_tensor else "a tensor, number, string, list or dict"


def flatten(
    value: Any,
    name: str,
    tensors: dict[str, torch.Tensor],
    other: Callable[[str, Any], Any] | None = None,
    seen: dict[int, str] | None = None,
) -> Any:
    """`value` as JSON, its tensors put into `tensors` under names that begin with `name`; one that is in several places
    of it is put there once.

    Args:
        other: what stands for a value that is not JSON's, from its place and itself.
        seen: the names of tensors that have one, by their ids.

    Raises:
        NotFlat: there is such a value, and no `other`.
    """
    seen = {} if seen is None else seen
    if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_sparse:
        if id(value) not in seen:
            while name in tensors:  # of a key with a dot
                name += "'"
            seen[id(value)], tensors[name] = name, value
        return {"tensor": seen[id(value)], "cpu": value.device.type == "cpu"}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [flatten(item, f"{name}.{place}", tensors, other, seen) for place, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) in (dict, OrderedDict) and all(type(key) in (bool, int, float, str) for key in value):
        return {"dict": [[key, flatten(item, f"{name}.{key}", tensors, other, seen)] for key, item in value.items()]}
    if other is None:
        raise NotFlat(name, value)
    return other(name, value)


def rebuild(described: Any, tensor_of: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    """The value that `flatten` described.

    Args:
        tensor_of: the tensor of a place, by its name in `place["tensor"]`; `place["cpu"]`: it was on the CPU.
    """
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        return tensor_of(described)
    if "dict" in described:
        return {key: rebuild(item, tensor_of) for key, item in described["dict"]}
    ((kind, items),) = described.items()
    rebuilt = [rebuild(item, tensor_of) for item in items]
    return tuple(rebuilt) if kind == "tuple" else rebuilt
