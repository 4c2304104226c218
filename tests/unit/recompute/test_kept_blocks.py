"""Blocks that run without a checkpoint: the same numbers, each block computed once, and the others as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from wanshim.core.recompute import KeptBlocks


class Block(nn.Module):
    """Counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.computed = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.computed += 1
        return x + scale * torch.tanh(self.linear(x))


def closed_over(block: Block) -> Callable[..., Any]:
    def custom_forward(*inputs: Any, **kwargs: Any) -> Any:
        return block(*inputs, **kwargs)

    return custom_forward


WAYS: dict[str, Callable[[Block], Callable[..., Any]]] = {
    "the module": lambda block: block,
    "its method": lambda block: block.forward,
    "a function that closes over it": closed_over,
}


def gradients(blocks: list[Block], run: Callable[..., Any], way: Callable[[Block], Callable[..., Any]]) -> list[Any]:
    for block in blocks:
        block.zero_grad()
    x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
    result = x
    for block in blocks:
        result = run(way(block), result, scale=0.5, use_reentrant=False)
    result.pow(2).sum().backward()
    return [result, x.grad, *(parameter.grad for block in blocks for parameter in block.parameters())]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_kept_blocks_are_computed_once_and_every_gradient_is_equal(way: Callable[[Block], Callable[..., Any]]) -> None:
    torch.manual_seed(5)
    blocks = [Block() for _ in range(4)]
    expected = gradients(blocks, checkpoint, way)
    assert [block.computed for block in blocks] == [2, 2, 2, 2]
    kept = KeptBlocks(blocks[2:])
    found = gradients(blocks, kept.around(checkpoint), way)
    assert all(map(torch.equal, expected, found))
    assert [block.computed for block in blocks] == [4, 4, 3, 3]
    assert kept.calls == 2


def test_options_of_the_checkpoint_do_not_reach_a_kept_block() -> None:
    block = Block()
    options = {"preserve_rng_state": False, "determinism_check": "none", "debug": False, "use_reentrant": False}
    run = KeptBlocks([block]).around(checkpoint)
    assert torch.equal(run(block, torch.ones(1, 8), scale=2.0, context_fn=noop_context_fn, **options),
                       block(torch.ones(1, 8), 2.0))  # fmt: skip


def test_block_of_equal_weights_is_another_block() -> None:
    """Blocks are told apart by identity, and what is not known is checkpointed."""
    block, twin = Block(), Block()
    twin.load_state_dict(block.state_dict())
    kept = KeptBlocks([block])
    run = kept.around(checkpoint)
    x = torch.ones(1, 8, requires_grad=True)
    run(twin, x, use_reentrant=False).sum().backward()
    run(lambda given: given * 2, x, use_reentrant=False).sum().backward()
    assert (kept.calls, twin.computed) == (0, 2)


def test_function_that_closes_over_a_name_not_yet_given_is_searched_too() -> None:
    block = Block()
    kept = KeptBlocks([block])

    def run(x: torch.Tensor) -> torch.Tensor:
        return block(x) if x.ndim == 2 else unpacked(x)

    kept.around(checkpoint)(run, torch.ones(1, 8), use_reentrant=False)
    unpacked = block.forward
    assert (kept.calls, block.computed) == (1, 1)
