"""Copies of models that take longer to build than to copy: LoRA injects 60 adapters, one module after another."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


def built_once(make: Callable[..., Made]) -> Callable[..., Made]:
    """`make`, which runs once for the same arguments; each call returns a copy of its own, and leaves torch's generator
    of the host as `make` left it."""

    @cache
    def original(*args: Any, **kwargs: Any) -> tuple[_Original, torch.Tensor]:
        return _Original(make(*args, **kwargs)), torch.get_rng_state()

    @wraps(make)
    def copied(*args: Any, **kwargs: Any) -> Made:
        found, generator = original(*args, **kwargs)
        torch.set_rng_state(generator)
        made: Made = found.copy()
        return made

    return copied


class _Original:
    """An object as a pickle, with its tensors beside it: `copy.deepcopy` takes as long as LoRA."""

    def __init__(self, made: object) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.functions: dict[int, FunctionType] = {}
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.persistent_id = self._set_aside  # type: ignore[method-assign]
        pickler.dump(made)
        self.pickled = file.getvalue()

    def _set_aside(self, part: object) -> int | None:
        if isinstance(part, FunctionType) and "<locals>" in part.__qualname__:  # as deepcopy does
            self.functions[id(part)] = part
        elif isinstance(part, torch.Tensor):
            self.tensors[id(part)] = part
        else:
            return None
        return id(part)

    def copy(self) -> Any:
        copies: dict[int, Any] = dict(self.functions)

        def copy_of(key: int) -> Any:
            if key not in copies:
                tensor = self.tensors[key]
                copied = tensor.detach().clone()
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                copies[key] = torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
            return copies[key]

        unpickler = pickle.Unpickler(io.BytesIO(self.pickled))
        unpickler.persistent_load = copy_of  # type: ignore[method-assign]
        return unpickler.load()
