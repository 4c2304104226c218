"""The bytes of a model's weights as they are stored, quantised or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors behind one: a quantised weight's values and scales, else the tensor itself.

    torchao's weights report the dtype and size they compute in; what lies in memory are these.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from stored(getattr(tensor, name))


def num_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers as stored, shared ones once."""
    return sum(map(stored_bytes, tensors(module)))


def host_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, as stored, that are in host memory; shared ones once."""
    parts = (part for tensor in tensors(module) for part in stored(tensor))
    return sum(_bytes(part) for part in parts if part.device.type == "cpu")


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor as stored, quantised or not."""
    return sum(map(_bytes, stored(tensor)))


def tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, then buffers; shared ones once."""
    yield from module.parameters()
    yield from module.buffers()


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of a module's own parameters and buffers, not its children's."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def base_dtypes(modules: Iterable[nn.Module]) -> str:
    """The dtypes in which frozen parameters are stored, by bytes, the largest first; under 1 % goes unsaid.

    `float8_e4m3fn 98 %, bfloat16 2 %`; empty where nothing is frozen.
    """
    sizes: Counter[str] = Counter()
    for module in modules:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                for part in stored(parameter):
                    sizes[str(part.dtype).removeprefix("torch.")] += _bytes(part)
    total = sum(sizes.values())
    shares = [(dtype, 100 * size / total) for dtype, size in sizes.most_common() if size]
    return ", ".join(f"{dtype} {share:.0f} %" for dtype, share in shares if share >= 1)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
