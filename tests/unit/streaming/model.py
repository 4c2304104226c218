"""A small model with a frozen base and adapters, and its data."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BLOCKS = 8


class Block(nn.Module):
    """A frozen base with a trainable adapter; a buffer with gaps and a transposed weight among it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(5, 12).t(), requires_grad=False)
        self.register_buffer("scale", torch.rand(12, 24)[:, 0])
        self.down, self.up = nn.Linear(12, 3, bias=False), nn.Linear(3, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) * self.scale + self.up(self.down(x))) + (x @ self.turned).mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 12).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpointing = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x.pow(2).mean()


def data(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
