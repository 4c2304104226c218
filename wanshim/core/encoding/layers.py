"""Run an encoder whose weights lie in host memory: each layer visits the device for its own forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def visiting_layers(
    model: nn.Module,
    layers: Iterable[nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype,
    lookups: Iterable[nn.Module] = (),
) -> Iterator[None]:
    """While the body runs, `model` computes on `device` with one of `layers` there at a time.

    The results are those of the whole model on `device`: the same kernels see the same shapes and values,
    because a weight that is stored narrower than `dtype` is widened exactly.

    Args:
        model: a module whose parameters lie on the CPU.
        layers: its blocks, run one after another; the largest decides the peak memory.
        device: where they compute.
        dtype: the floating dtype in which they compute.
        lookups: embeddings, far larger than a block and nothing but a row lookup; they stay on the CPU and
            their output moves.

    Everything else that has parameters (norms, small projections) lies on `device` throughout.
    """
    layers, lookups = list(layers), list(lookups)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_visit_on_call(layer, device, dtype))
        for lookup in lookups:
            stack.enter_context(_look_up_on_cpu(lookup, device, dtype))
        apart = {id(p) for module in (*layers, *lookups) for p in module.parameters()}
        stack.enter_context(_moved((p for p in model.parameters() if id(p) not in apart), device, dtype))
        stack.enter_context(_moved(model.buffers(), device, dtype))
        yield


@contextmanager
def _moved(tensors: Iterable[torch.Tensor], device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    homes = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, home in homes:
            tensor.data = home.to(device, dtype if home.is_floating_point() else None)
        yield
    finally:
        for tensor, home in homes:
            tensor.data = home


@contextmanager
def _visit_on_call(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    visit = ExitStack()

    def arrive(module: nn.Module, args: Any) -> None:
        visit.enter_context(_moved(module.parameters(), device, dtype))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        visit.close()

    with visit, layer.register_forward_pre_hook(arrive), layer.register_forward_hook(leave, always_call=True):
        yield


@contextmanager
def _look_up_on_cpu(lookup: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    def fetch(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args)

    def hand_over(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(device, dtype)

    with lookup.register_forward_pre_hook(fetch), lookup.register_forward_hook(hand_over):
        yield
