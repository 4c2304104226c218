"""Dropout in a model that is split over two GPUs drops what it drops on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wanshim.core.model_split import split_model

HOME, OTHER = (torch.device("cuda", i) for i in range(2))
pytestmark = [pytest.mark.gpu(2), pytest.mark.usefixtures("deterministic_kernels")]


class Block(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Model(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(Block(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 64)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


@pytest.mark.parametrize("checkpoints", [False, True], ids=["keep", "checkpoint"])
@pytest.mark.parametrize("drops", [True, False])
def test_split_model_drops_what_it_drops_on_one_gpu(checkpoints: bool, drops: bool) -> None:
    def train(*, split: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Model(checkpoints).to(HOME)
        if split:
            split_model(model, [HOME, OTHER])
        model.train(drops)
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            result = model(torch.randn(8, 64, device=HOME))
            result.square().mean().backward()
            found.append(result.detach())
        found += [weight.grad.to(HOME) for weight in model.parameters() if weight.grad is not None]
        return [*found, *(torch.randn(4, device=device).to(HOME) for device in (HOME, OTHER))]

    assert all(map(torch.equal, train(split=False), train(split=True)))
