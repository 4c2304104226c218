"""Store the frozen Linear weights of a model in eight bits: torchao's weight-only configurations.

Activations stay in the model's dtype, and each Linear computes with its weight dequantised, so LoRA trains on
top and gradients pass through. Trainable parameters, norms, embeddings and biases are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wanshim.errors import PlacementInvalid
from wanshim.values import EIGHT_BIT


def quantize_base(
    modules: Sequence[nn.Module] | nn.ModuleList, base: str, *, compute_device: torch.device | str | None = None
) -> int:
    """Quantise every frozen Linear weight in `modules`, in place, one layer at a time.

    Done before the modules move to their stage, no device ever holds a stage unquantised: at most one layer's
    weight in the old dtype lies there beside what is quantised already.

    Args:
        modules: such as the blocks of one stage, with or without LoRA.
        base: `float8` (e4m3) or `int8`, both weight-only with a scale a row.
        compute_device: where the arithmetic is done; the result returns to where the weight lay. Default:
            where the weight lies.

    Returns:
        The number of layers that were quantised. Layers that are already are passed over.

    Raises:
        PlacementInvalid: `base` is unknown, torchao is not installed, nothing is frozen, or a weight is
            stored in eight bits already. No layer is changed then.
    """
    config = _config(base)
    layers = [layer for module in modules for path, layer in module.named_modules() if _takes(path, layer)]
    if not layers and not any(quantized_names(module, trained=False) for module in modules):
        raise PlacementInvalid(
            f"no frozen Linear weight to store as {base}",
            expected="a frozen base, with LoRA on top",
            topic="trained_base",
        )
    for layer in layers:
        if layer.weight.dtype.itemsize < 2:
            raise PlacementInvalid(
                f"a Linear stored as {layer.weight.dtype}",
                expected="bfloat16, float16 or float32 to quantise from",
                topic="rounded_base",
            )
    for layer in layers:
        _quantize(layer, config, compute_device)
    return len(layers)


def quantized_names(model: nn.Module, *, trained: bool) -> list[str]:
    """Names of parameters stored as quantised tensors: the frozen ones, which DDP can neither flatten nor needs to
    send round, or those set to be trained, which no optimizer can."""
    named = model.named_parameters()
    return [name for name, p in named if p.requires_grad is trained and is_traceable_wrapper_subclass(p)]


def _takes(path: str, module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or module.weight.requires_grad or is_traceable_wrapper_subclass(module.weight):
        return False
    return not any(part.startswith("lora_") for part in path.split("."))  # a frozen adapter is one all the same


def _config(base: str) -> Any:
    """torchao's configuration: one scale a row of the weight."""
    if base not in EIGHT_BIT:
        raise PlacementInvalid(f"base {base!r}", expected=f"one of {', '.join(EIGHT_BIT)}")
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError as error:
        raise PlacementInvalid(
            f"a {base} base needs torchao, and {error}",
            expected="a torchao that fits the installed torch",
            topic="install_torchao",
        ) from error
    # version 2: whose weights move between devices as one tensor
    return Float8WeightOnlyConfig() if base == "float8" else Int8WeightOnlyConfig(version=2)


def _quantize(layer: nn.Module, config: Any, compute_device: torch.device | str | None) -> None:
    from torchao.quantization import quantize_

    weight = layer._parameters["weight"]
    assert weight is not None
    home = weight.device
    # A stand-in of its own: the layer keeps its class (a subclass, a wrapper) and its hooks.
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().to(compute_device or home), requires_grad=False)
    quantize_(linear, config)
    layer._parameters["weight"] = linear.to(home).weight
