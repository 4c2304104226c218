"""Blocks of packed tokens that attend by a function, as MiniMax-H3's do, take the unsharded step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.tiny import farthest
from wanshim import shard_sequence
from wanshim.core.sequence import BlockList
from wanshim.errors import ModelInvalid

HEADS, WIDTH = 5, 4
BOUNDS = ((0, 17), (17, 29))  # the first cuts through a rank's share


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any) -> torch.Tensor:
    """In pieces of (tokens, heads, width)."""
    pieces = [[t[start:stop].transpose(0, 1)[None] for t in (q, k, v)] for start, stop in bounds]
    return torch.cat([functional.scaled_dot_product_attention(*piece)[0].transpose(0, 1) for piece in pieces])


def attend_otherwise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any) -> torch.Tensor:
    return attend_unsharded(q, k, v, bounds)


attend_unsharded = attend


class Attention(nn.Module):
    def __init__(self, otherwise: bool) -> None:
        super().__init__()
        self.num_heads, self.otherwise = HEADS, otherwise
        self.qkv, self.out = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def forward(self, x: torch.Tensor, turn: torch.Tensor, bounds: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), self.num_heads, 3, WIDTH).unbind(2)
        function = attend_otherwise if self.otherwise else attend
        return self.out(function(q * turn, k * turn, v, bounds).reshape(len(x), -1))


class Block(nn.Module):
    def __init__(self, otherwise: bool) -> None:
        super().__init__()
        self.attn, self.norm = Attention(otherwise), nn.LayerNorm(HEADS * WIDTH)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, which: torch.Tensor, turn: Any, bounds: Any) -> Any:
        return x + self.attn(self.norm(x) * scale[which], turn, bounds)


class Model(nn.Module):
    """Its first attention is outside of the blocks."""

    def __init__(self, otherwise: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.refiner = nn.Parameter(torch.randn(3, HEADS * WIDTH)), Attention(False)
        self.blocks = nn.ModuleList(Block(otherwise) for _ in range(2))
        self.head = nn.Linear(HEADS * WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn, which = torch.linspace(0.5, 1.5, len(x) * WIDTH).view(len(x), 1, WIDTH), torch.arange(len(x)) % 3
        x = x + self.refiner(x, turn, BOUNDS)
        for block in self.blocks:
            x = block(x, scale=self.scale, which=which, turn=turn, bounds=BOUNDS)
        return self.head(x)

    def lists(self) -> list[BlockList]:
        return [
            BlockList(
                blocks=list(self.blocks),
                exit=self.head,
                function=f"{__name__}:attend",
                num_heads=("attn.num_heads",),
                per_token={"x": {2: 0}, "which": {1: 0}, "turn": {3: 0}},
                whole=(),
            )
        ]


def step(model: Model) -> tuple[list[float], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    loss = model(torch.randn((BOUNDS[-1][1], HEADS * WIDTH), generator=generator)).square().mean()
    loss.backward()
    return [loss.item()], {name: p.grad for name, p in model.named_parameters()}


def sharded(rank: int, size: int) -> tuple[float, bool, bool]:
    expected, model, original = step(Model()), Model(), attend
    handle = shard_sequence(model, blocks=model.lists(), deadline=60)
    found = step(model)
    with torch.no_grad():
        whole = model(torch.ones(BOUNDS[-1][1], HEADS * WIDTH)).shape == (BOUNDS[-1][1], 3)
    handle.remove()
    return farthest(found, expected), whole, attend is original


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sharded_step_is_the_unsharded_one(ranks: int) -> None:
    for distance, is_whole, as_before in values(run_ranks(sharded, ranks)):
        assert distance <= 2e-5
        assert is_whole
        assert as_before


def rounded_otherwise(rank: int, size: int) -> list[float]:
    model, before = Model(), nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
    handle = shard_sequence(model, blocks=model.lists(), deadline=60)
    handle.match_trained(before)

    def round_otherwise(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * (1 + 1e-6 * rank))

    modules = [model.refiner.qkv, model.head, before]
    for module in modules:  # as attention's backward rounds on a GPU, in each run otherwise
        module.register_forward_hook(round_otherwise)
    outside = [module.weight for module in modules]
    model(
        before(torch.linspace(-1, 1, BOUNDS[-1][1] * HEADS * WIDTH).view(-1, HEADS * WIDTH))
    ).square().mean().backward()
    handle.remove()
    return [parameter.grad.double().norm().item() for parameter in outside if parameter.grad is not None]


def test_what_is_trained_outside_of_the_blocks_has_one_gradient() -> None:
    """Else it drifts apart, and so do the blocks' inputs."""
    first, second = values(run_ranks(rounded_otherwise, 2))
    assert len(first) == 3
    assert first == second


def other(rank: int, size: int) -> str:
    model = Model(otherwise=True)
    handle = shard_sequence(model, blocks=model.lists(), deadline=60)
    with pytest.raises(ModelInvalid) as caught:
        step(model)
    handle.fail(caught.value)
    return str(caught.value)


def test_block_that_attends_by_another_function_is_an_error() -> None:
    """It would attend to the tokens of its rank alone."""
    for text in values(run_ranks(other, 2)):
        assert "block 0 attends by another function than" in text
