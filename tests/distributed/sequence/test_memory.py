"""What a step leaves behind: nothing of a block's graph is alive once the block's backward is over."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import wanshim
from tests.distributed.decoding.ranks import run_ranks, values

from .tiny import Case


def alive_after_a_step(rank: int, size: int, checkpointing: str) -> tuple[int, int]:
    """How many attention inputs were made in a step, recomputed ones included, and how many outlive it."""
    case = Case(checkpointing=checkpointing)
    model = case.model()
    handle = wanshim.shard_sequence(model, deadline=60)
    seen: list[weakref.ref[torch.Tensor]] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        seen.extend(weakref.ref(tensor) for tensor in args if isinstance(tensor, torch.Tensor))

    for block in model.blocks:
        block.self_attn.attn.register_forward_pre_hook(note)
    loss = case.loss(model, 1)
    loss.backward()
    del loss
    alive = sum(one() is not None for one in seen)  # by reference counts alone: no collection in between
    handle.remove()
    return len(seen), alive


@pytest.mark.parametrize("checkpointing", ["none", "saved", "reentrant"])
def test_nothing_of_a_block_outlives_its_backward(checkpointing: str) -> None:
    for made, alive in values(run_ranks(alive_after_a_step, 2, checkpointing)):
        assert made == 9 * (1 if checkpointing == "none" else 2)
        assert alive == 0
