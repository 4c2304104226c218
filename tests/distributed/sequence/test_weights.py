"""Ranks that begin with different weights: what is trained comes from the first rank, what is frozen is compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wanshim
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.cases import EXACT
from tests.distributed.sequence.faults import outcome_of
from wanshim.core.sequence import BlockList

from .tiny import Block, Case, Transformer, farthest

CASE = Case(ranks=3, trained="blocks")


def moved(model: Transformer, rank: int, part: str) -> None:
    """As a seed of its own on each rank would leave them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if rank and name.startswith(part):
                parameter.add_(rank)


def other_trained_weights(rank: int, size: int) -> float:
    model = CASE.model()
    moved(model, rank, "blocks.")
    identities = list(map(id, model.parameters()))
    handle = wanshim.shard_sequence(model, deadline=60)
    assert identities == list(map(id, model.parameters()))
    found = CASE.step(model)
    handle.remove()
    return farthest(found, CASE.step(CASE.model()))


def test_trained_weights_come_from_the_first_rank() -> None:
    assert max(values(run_ranks(other_trained_weights, 3))) <= EXACT


def other_frozen_weights(rank: int, size: int, kind: str) -> tuple[str, str, float]:
    model = CASE.model()
    if kind == "value" and rank == 1:
        model.text.weight.data[-1, -1] += 1
    if kind == "dtype" and rank == 1:
        model.text.half()
    if kind == "trained" and rank == 1:
        model.text.weight.requires_grad_(True)
        model.time.weight.requires_grad_(True)
        model.blocks[0].cross.requires_grad_(False)  # as many trained as on the other ranks
        model.blocks[0].cross.weight = torch.nn.Parameter(torch.zeros(20, 20), requires_grad=False)
        model.text.weight = torch.nn.Parameter(torch.zeros(20, 20))
        model.time.weight.requires_grad_(False)
    if kind == "buffer":
        model.register_buffer("scale", torch.full((2,), 1.0 + (rank == 1)))
    return outcome_of(lambda: wanshim.shard_sequence(model, deadline=30))


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("value", ["  text.weight\n    rank 0: float32 [20, 3], frozen, digest "]),
        ("buffer", ["  scale\n    rank 0: float32 [2], frozen, digest "]),
        ("dtype", ["    rank 1: float16 [20, 3], frozen"]),
        ("trained", ["    rank 1: float32 [20, 20], frozen", "    rank 1: float32 [20, 20], trained"]),
    ],
)
def test_frozen_weights_that_differ_are_one_table_on_every_rank(kind: str, rows: list[str]) -> None:
    outcomes = values(run_ranks(other_frozen_weights, 3, kind))
    assert {name for name, _, _ in outcomes} == {"RankDisagreement"}
    (text,) = {text for _, text, _ in outcomes}
    assert "The ranks hold different weights, " in text
    for row in rows:
        assert row in text


def outside_the_model(rank: int, size: int) -> Any:
    """Blocks that the model does not hold, and another module that is trained with it."""
    torch.manual_seed(0)
    model, beside, extra = CASE.model(), Block(5), torch.nn.Linear(2, 2)
    lists = [BlockList(blocks=[beside], gather=False), BlockList(blocks=list(model.blocks), exit=model.head)]
    with torch.no_grad():
        for parameter in (*beside.parameters(), *extra.parameters()):
            parameter.add_(rank)
    handle = wanshim.shard_sequence(model, blocks=lists, deadline=30)
    handle.match_trained(extra)
    handle.remove()
    return [parameter.sum().item() for parameter in (*beside.parameters(), *extra.parameters())]


def test_blocks_and_modules_outside_the_model_come_from_the_first_rank_too() -> None:
    first, second = values(run_ranks(outside_the_model, 2))
    assert first == second


def drifted(rank: int, size: int, what: str) -> tuple[str, str, float]:
    """Ranks that are alike at first, and a rank on which something has changed since."""
    model, lr = CASE.model(), 1e-3
    beside = torch.nn.ModuleList([Block(5)])
    blocks = [BlockList(blocks=list(beside), gather=False), BlockList(blocks=list(model.blocks), exit=model.head)]
    handle = wanshim.shard_sequence(model, blocks=blocks, deadline=30)
    handle.compare_trained({"lr": str(lr)})
    with torch.no_grad():
        model.text.weight.add_(rank)  # frozen: compared at the start alone
        if what == "weight" and rank == 1:
            model.blocks[1].ffn[0].weight[-1, -1] += 1e-6
        if what == "block beside" and rank == 1:
            beside[0].ffn[0].weight.neg_()
    if what == "number" and rank == 1:
        lr = 1e-4
    return outcome_of(lambda: handle.compare_trained({"lr": str(lr)}))


@pytest.mark.parametrize(
    ("what", "row"),
    [
        ("weight", "  blocks.1.ffn.0.weight\n    rank 0: digest "),
        ("block beside", "  ffn.0.weight\n    rank 0: digest "),
        ("number", "  lr\n    rank 0: 0.001\n    rank 1: 0.0001"),
    ],
)
def test_trained_weights_and_numbers_that_drift_apart_are_one_table_on_every_rank(what: str, row: str) -> None:
    outcomes = values(run_ranks(drifted, 2, what))
    assert {name for name, _, _ in outcomes} == {"RankDisagreement"}
    (text,) = {text for _, text, _ in outcomes}
    assert text.startswith("The ranks have drifted apart, in 1 of ")
    assert row in text


def test_ranks_that_train_alike_have_not_drifted() -> None:
    assert {name for name, _, _ in values(run_ranks(drifted, 2, "nothing"))} == {""}
