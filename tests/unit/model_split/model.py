"""A small model with a list of blocks."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, shift: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        cache["last"] = x
        return self.linear(x) + shift


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.small = nn.ModuleList([nn.Linear(1, 1) for _ in range(9)])
        self.body = nn.ModuleDict({"layers": nn.ModuleList([Block() for _ in range(blocks)])})

    def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        shift = x.mean()
        x = self.embed(x)
        for block in self.body["layers"]:
            x = block(x, shift, cache)
        return x
