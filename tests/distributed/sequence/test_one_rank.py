"""A rank that calls a sharded model alone computes alone, and the others wait; what cannot work says so at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import wanshim
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.faults import outcome_of

from .tiny import Case, Transformer, farthest

CASE = Case(ranks=2, heads=4)
CPU = torch.device("cpu")
DEADLINE = 6.0
SOON = 5.0  # the ranks look at each other every 0.2 s; the rest is for a machine under load


def sharded(**options: Any) -> tuple[Transformer, Any]:
    model = CASE.model()
    return model, wanshim.shard_sequence(model, deadline=DEADLINE, **options)


def called(model: Transformer, seed: int = 5) -> tuple[torch.Tensor, set[int]]:
    """The output without gradients, and how many heads attention saw."""
    heads = set[int]()
    inputs = {name: value for name, value in CASE.sample(seed).items() if name != "target"}
    attention = model.blocks[1].self_attn.attn
    with attention.register_forward_hook(lambda module, *_: heads.add(module.num_heads)), torch.no_grad():
        return model(**inputs), heads


def validated_by_one(rank: int, size: int) -> tuple[bool, set[int], float]:
    """Before the first step and after it, for longer than any wait of the others may take."""
    expected, _ = called(CASE.model())
    gradients = CASE.step(CASE.model())
    model, _ = sharded()
    equal, heads = True, set[int]()
    for _ in range(2):
        if rank == 0:
            for _ in range(2):
                found, seen = called(model)
                equal, heads = equal and torch.equal(found, expected), heads | seen
            time.sleep(1.5 * DEADLINE)
            called(model)
        distance = farthest(CASE.step(model), gradients)
        model.zero_grad()
    return equal, heads, distance


@pytest.mark.slow
def test_validation_on_one_rank_computes_what_the_whole_model_does_and_training_goes_on() -> None:
    results = values(run_ranks(validated_by_one, 2))
    assert results[0][:2] == (True, {CASE.heads})
    assert max(distance for *_, distance in results) <= 1e-5


def validated_by_all(rank: int, size: int, late: float, own: bool) -> tuple[bool, set[int], float]:
    expected, _ = called(CASE.model(), seed=rank * own)
    model, _ = sharded()
    CASE.step(model)
    model.zero_grad()
    time.sleep(late * rank)
    found, heads = called(model, seed=rank * own)
    return torch.allclose(found, expected, atol=1e-5), heads, farthest(CASE.step(model), CASE.step(CASE.model()))


@pytest.mark.parametrize(
    ("late", "own", "heads"), [(0.0, False, 1), (2.0, False, 2), (0.0, True, 2)], ids=["together", "late", "own input"]
)
def test_call_of_all_ranks_is_shared_unless_one_is_late_or_has_inputs_of_its_own(
    late: float, own: bool, heads: int
) -> None:
    for right, seen, distance in values(run_ranks(validated_by_all, 2, late, own)):
        assert right
        assert seen == {CASE.heads * heads // 2}
        assert distance <= 1e-5


def failed_alone(rank: int, size: int) -> float:
    model, _ = sharded()
    if rank == 0:
        block = model.blocks[1]
        with block.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            called(model)
    return farthest(CASE.step(model), CASE.step(CASE.model()))


def test_error_that_one_rank_alone_has_and_catches_leaves_training_as_it_is() -> None:
    assert max(values(run_ranks(failed_alone, 2))) <= 1e-5


def trained_by_one(rank: int, size: int) -> tuple[str, str, float]:
    model, handle = sharded()
    if rank == 0:
        return outcome_of(lambda: CASE.step(model))
    return outcome_of(lambda: handle.leader.share(lambda: 1, CPU))


def test_call_with_gradients_of_one_rank_is_named_at_once() -> None:
    for name, text, seconds in values(run_ranks(trained_by_one, 2)):
        assert name == "RankDisagreement"
        assert "rank 0: the model, with gradients\n  rank 1: what the first rank makes" in text
        assert "under torch.no_grad()" in text
        assert seconds < SOON


def met_by_one(rank: int, size: int) -> tuple[float, float]:
    """A meeting in a branch of rank 0, then one that rank 1 comes to late."""
    model, handle = sharded()
    began = time.monotonic()
    if rank == 0:
        handle.attendance.meet(60.0)
    CASE.step(model)
    alone, began = time.monotonic() - began, time.monotonic()
    time.sleep(3.0 * rank)
    handle.attendance.meet(60.0)
    waited = time.monotonic() - began
    if rank == 0:
        handle.attendance.meet(60.0)
    handle.remove()
    return alone, waited


@pytest.mark.slow
def test_meeting_waits_for_who_will_come_and_for_nobody_else() -> None:
    for alone, waited in values(run_ranks(met_by_one, 2)):
        assert alone < SOON
        assert waited >= 2.0  # less than the 3 slept: each rank's clock begins when its own step has ended
