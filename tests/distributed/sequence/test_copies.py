"""A sharded model is copied and stored as a plain one; a removal too early and dropout are refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import wanshim
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.cases import EXACT
from tests.distributed.sequence.faults import outcome_of
from wanshim.core.sequence import BlockList

from .tiny import Block, Case, Transformer, farthest

CASE = Case()


def _loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)  # written in this process, a moment ago
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {"deepcopy": copy.deepcopy, "torch.save": _loaded}


def copied(rank: int, size: int, way: str) -> tuple[float, float, list[str]]:
    """How far a copy's step alone, and the sharded step after it, are from the unsharded one."""
    expected, model, beside = CASE.step(CASE.model()), CASE.model(), nn.ModuleList([Block(5)])
    lists = [
        BlockList(blocks=list(beside), gather=False),
        BlockList(blocks=list(model.blocks), exit=model.head),
    ]
    handle = wanshim.shard_sequence(model, blocks=lists, deadline=30)
    holder = nn.ModuleDict({"dit": model, "beside": beside})
    plain = COPIES[way](holder)
    alone = farthest(CASE.step(plain["dit"]), expected) if rank == 1 else 0.0  # a sharded one would wait for rank 0
    sharded = farthest(CASE.step(model), expected)
    handle.remove()
    left = [name for module in holder.modules() for name in vars(module) if name.startswith(("__", "_wanshim"))]
    return alone, sharded, left


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_sharded_model_are_plain(way: str) -> None:
    for alone, sharded, left in values(run_ranks(copied, 2, way)):
        assert max(alone, sharded) <= EXACT
        assert left == []


def removed_between(rank: int, size: int) -> tuple[tuple[str, str, float], list[str]]:
    model = Case(checkpointing="saved").model()
    handle = wanshim.shard_sequence(model, deadline=30)
    loss = Case(checkpointing="saved").loss(model, 1)
    handle.remove()
    outcome = outcome_of(loss.backward)
    return outcome, [name for name, p in model.blocks.named_parameters() if p.grad is not None]


def test_backward_after_remove_is_refused_before_a_block_has_a_gradient() -> None:
    for (found, message, _), with_gradient in values(run_ranks(removed_between, 2)):
        assert found == "ModelInvalid"
        assert message.startswith("a backward pass through a model that is no longer sharded. Expected remove() after")
        assert with_gradient == []


class Dropping(Block):
    """A block that drops without a module that says so."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, t_mod: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(x, context, t_mod, freqs), 0.25, self.training)


def with_dropout(rank: int, size: int) -> dict[str, Any]:
    def model(change: Callable[[Transformer], Any]) -> Transformer:
        made = CASE.model()
        change(made)
        return made

    def lora(made: Transformer) -> None:
        made.blocks[1].ffn = nn.Sequential(*made.blocks[1].ffn, nn.Dropout(0.1))

    hidden, in_eval = model(lambda made: made.blocks.__setitem__(2, Dropping(5))), model(lora).eval()
    handle = wanshim.shard_sequence(hidden, deadline=30)
    found = {
        "module": outcome_of(lambda: wanshim.shard_sequence(model(lora), deadline=30))[:2],
        "function": outcome_of(lambda: CASE.loss(hidden, 1))[:2],
    }
    handle.remove()
    expected = CASE.step(in_eval)
    handle = wanshim.shard_sequence(in_eval, deadline=30)
    distance = farthest(CASE.step(in_eval), expected)
    in_eval.train()
    found["later"] = outcome_of(lambda: CASE.loss(in_eval, 1))[:2]
    handle.remove()
    return {**found, "distance": distance}


def test_dropout_in_a_block_is_refused_by_name_and_allowed_where_it_drops_nothing() -> None:
    for found in values(run_ranks(with_dropout, 2)):
        for way, start in (
            ("module", "Block 1 draws random numbers: ffn.3 (p=0.1). Expected blocks without dropout"),
            ("function", "Dropping 2 draws random numbers. Expected blocks without dropout"),
            ("later", "Block 1 draws random numbers: ffn.3 (p=0.1). Expected blocks without dropout"),
        ):
            assert found[way][0] == "ModelInvalid"
            assert found[way][1].startswith(start)
        assert found["distance"] <= EXACT


def gradient_of_a_gradient(rank: int, size: int) -> tuple[str, str, float]:
    model = Case(trained="blocks").model()
    wanshim.shard_sequence(model, deadline=30)

    def penalty() -> None:
        sample = Case(trained="blocks").sample(1)
        latents = sample["latents"]
        del sample["target"]
        (gradient,) = torch.autograd.grad(model(**sample).sum(), latents, create_graph=True)
        gradient.square().sum().backward()

    return outcome_of(penalty)


def test_gradient_of_a_gradient_is_refused() -> None:
    for found, message, _ in values(run_ranks(gradient_of_a_gradient, 2)):
        assert (found, "once_differentiable" in message) == ("RuntimeError", True)
