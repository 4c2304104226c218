"""The identity of a frozen model as text: two models of one identity compute the same from the same inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wanshim.core.encoding.files import sha256_json
from wanshim.core.encoding.identity import class_code, own_code
from wanshim.core.shared.digest import digest, digests
from wanshim.core.shared.fallback import Fallback
from wanshim.core.shared.plain import why_not_plain

_PLAIN = (type(None), bool, int, float, str, torch.dtype)


def model_identity(name: str, model: nn.Module) -> str:
    """Classes, code, options and all weights of a model. Weights are read where they are, every element of them.

    Args:
        name: of the model, for the reason.

    Raises:
        Fallback: it trains, or another call of it may compute otherwise.
    """
    if any(parameter.requires_grad for parameter in model.parameters()):
        raise Fallback(f"{name} trains")
    if (found := why_not_plain(model.modules(), rebound=lambda module: True)) is not None:
        raise Fallback(f"{name} {found[1]}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor in tensors.values():
        if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise Fallback(f"{name} has weights that are no plain tensors in memory")
    weights = [
        f"{path} {tensor.dtype} {tuple(tensor.shape)} {number}"
        for (path, tensor), number in zip(tensors.items(), digests(list(tensors.values())), strict=True)
    ]
    classes = sorted({class_code(type(module)) for module in model.modules()})
    modules = [[path, type(module).__qualname__, *options_of(module)] for path, module in model.named_modules()]
    return sha256_json([weights, classes, modules])


def options_of(value: Any) -> list[str]:
    """The public attributes of an object that are numbers, names, tensors and functions of its own."""
    named = {name: item for name, item in sorted(vars(value).items()) if not name.startswith("_")}
    texts = {name: _described(item) for name, item in named.items()}
    return [*(f"{name} {text}" for name, text in texts.items() if text), *own_code(value)]


def _described(item: Any) -> str:
    """An attribute as text; empty: it is not compared."""
    if isinstance(item, torch.Tensor):
        return digest(item)
    if isinstance(item, (tuple, list)):
        return f"({', '.join(map(_described, item))})"
    return repr(item) if isinstance(item, _PLAIN) else ""
