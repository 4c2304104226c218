"""What the first rank of a group makes reaches every rank, and an error in making it does too."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import wanshim
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.faults import outcome_of
from wanshim.core.sequence import random_states, set_random_states

from .tiny import Case

CPU = torch.device("cpu")


def handle_of() -> Any:
    return wanshim.shard_sequence(Case(ranks=3).model(), deadline=16)


def leader_of() -> Any:
    return handle_of().leader


def share_everything(rank: int, size: int) -> tuple[Any, int]:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(rank)
        return {
            "tensors": [torch.arange(6.0).view(2, 3).T, torch.tensor(7, dtype=torch.bfloat16), torch.empty(0, 4)],
            "others": (None, True, 3, 2.5, "text"),
            "bits": torch.tensor([True, False]),
            "complex": torch.tensor([1 + 2j]),
        }

    return leader_of().share(make, CPU), len(made)


def test_tensors_of_any_dtype_and_plain_values_come_as_they_are() -> None:
    outcomes = values(run_ranks(share_everything, 3))
    assert [times for _, times in outcomes] == [1, 0, 0]
    for found, _ in outcomes:
        assert found["others"] == (None, True, 3, 2.5, "text")
        assert torch.equal(found["tensors"][0], torch.arange(6.0).view(2, 3).T)
        assert (found["tensors"][1].item(), found["tensors"][1].dtype) == (7, torch.bfloat16)
        assert found["tensors"][2].shape == (0, 4)
        assert torch.equal(found["bits"], torch.tensor([True, False]))
        assert torch.equal(found["complex"], torch.tensor([1 + 2j]))


def share_in_a_row(rank: int, size: int) -> list[int]:
    """Nothing holds the first rank back where no tensor travels: it is done before the others begin."""
    leader = leader_of()
    if rank:
        dist.barrier()
    found = [leader.share(lambda value=value: value, CPU) for value in (1, 2, 3)]
    if not rank:
        dist.barrier()
    return found


def test_first_rank_that_goes_ahead_overwrites_nothing_that_others_have_not_read() -> None:
    assert values(run_ranks(share_in_a_row, 3)) == [[1, 2, 3]] * 3


def share_what_cannot_travel(rank: int, size: int, kind: str) -> Any:
    unshareable = {"object": object(), "gradient": torch.ones(1, requires_grad=True), "keys": {(1,): 2}}
    calls: list[int] = []
    leader_of().share(lambda: (calls.append(rank), unshareable[kind])[1], CPU)
    return calls


@pytest.mark.parametrize("kind", ["object", "gradient", "keys"])
def test_what_cannot_travel_is_made_by_every_rank(kind: str) -> None:
    assert values(run_ranks(share_what_cannot_travel, 3, kind)) == [[0], [1], [2]]


def fail_to_make(rank: int, size: int) -> Any:
    def make() -> None:
        raise ValueError("no such prompt")

    leader = leader_of()
    return outcome_of(lambda: leader.share(make, CPU))


def test_error_in_making_it_ends_every_rank_with_its_name() -> None:
    first, *others = values(run_ranks(fail_to_make, 3))
    assert first[:2] == ("ValueError", "no such prompt")
    for name, text, _ in others:
        assert name == "RanksFailed"
        assert "rank 0: ValueError: no such prompt" in text


def draw_alike(rank: int, size: int) -> tuple[float, ...]:
    leader = leader_of()
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)
    set_random_states(leader.share(lambda: random_states(CPU), CPU), CPU)
    return torch.rand(()).item(), random.random(), float(numpy.random.random())


def test_random_states_of_the_first_rank_are_drawn_from_on_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    expected = (torch.rand(()).item(), random.random(), float(numpy.random.random()))
    assert values(run_ranks(draw_alike, 3)) == [expected] * 3


def come_or_leave(rank: int, size: int) -> tuple[str, str, float]:
    attendance = handle_of().attendance
    attendance.meet(16)
    if rank == 2:
        time.sleep(8)
        return "left", "", 0.0
    return outcome_of(lambda: attendance.meet(1.5))


@pytest.mark.slow
def test_meeting_ends_for_all_who_came_and_within_its_time_for_one_who_did_not() -> None:
    *came, left = values(run_ranks(come_or_leave, 3))
    assert left[0] == "left"
    for name, text, seconds in came:
        assert name == "RanksFailed"
        assert "nothing within 1.5 s in waiting for the other ranks" in text or "rank 2" in text
        assert seconds < 16
