"""One step of a variant, whole and split, and its placement on fake GPUs."""

from __future__ import annotations

from typing import Any

import torch

from tests.contract.diffsynth import variants


def step(made: variants.Variant, **options: Any) -> list[torch.Tensor]:
    """Loss and every gradient, on the host."""
    torch.manual_seed(7)  # WanToDance's music encoder drops out at random
    loss = made(**options).float().pow(2).mean()
    loss.backward()
    gradients = [p.grad for model in made.modules().values() for p in model.parameters()]
    assert sum(g is not None for g in gradients) > 0.8 * len(gradients)
    return [loss.detach().cpu(), *(torch.zeros(()) if g is None else g.cpu() for g in gradients)]


def move_fake(module: torch.nn.Module, device: torch.device) -> None:
    """Module.to cannot move a fake parameter, so it is made anew where it is wanted."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            moved = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            module._parameters[name] = torch.nn.Parameter(moved)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)
