"""A training step by hand, over any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def train_step(
    model: torch.nn.Module, forward: Callable[..., torch.Tensor], inputs: Callable[[int], dict[str, Any]]
) -> list[torch.Tensor]:
    """Two accumulated micro-batches: both losses, then every gradient in order of name, on the host."""
    model.train()
    results = []
    for seed in (1, 2):
        sample = inputs(seed)
        output = forward(model, **sample)
        assert output.device == sample["latents"].device
        loss = torch.nn.functional.mse_loss(output.float(), sample["latents"].float())
        loss.backward()
        results.append(loss.detach().cpu())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients
    assert all(g is not None and bool(g.any()) for g in gradients.values())
    return results + [gradients[name].cpu() for name in sorted(gradients)]
