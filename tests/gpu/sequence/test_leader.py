"""Random states and tensors of the first rank, on real devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wanshim
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.tiny import Case
from wanshim.core.sequence import random_states, set_random_states

pytestmark = pytest.mark.timeout(400)


def draws(device: torch.device) -> list[float]:
    return [torch.rand(()).item(), torch.rand((), device=device).item(), torch.randn((), device=device).item()]


@pytest.mark.gpu(1)
def test_states_that_were_set_draw_the_same_on_the_cpu_and_on_the_device() -> None:
    device = torch.device("cuda:0")
    states = random_states(device)
    expected = draws(device)
    assert draws(device) != expected
    set_random_states(states, device)
    assert draws(device) == expected


def share(rank: int, size: int) -> tuple[list[float], dict[str, Any]]:
    device = torch.device("cuda", rank)
    leader = wanshim.shard_sequence(Case(ranks=size, device="cuda").model(), deadline=60).leader
    torch.manual_seed(rank)
    set_random_states(leader.share(lambda: random_states(device), device), device)
    made = {"latents": torch.arange(6.0, device=device), "mask": torch.tensor([True, False])}
    found = leader.share(lambda: made, device)
    return draws(device), {name: (str(tensor.device), tensor.tolist()) for name, tensor in found.items()}


@pytest.mark.gpu(2)
def test_states_and_tensors_of_the_first_rank_are_on_each_rank_s_own_device() -> None:
    found = values(run_ranks(share, 2, backend="nccl"))
    assert found[0][0] == found[1][0]
    for rank, (_, tensors) in enumerate(found):
        assert tensors == {"latents": (f"cuda:{rank}", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), "mask": ("cpu", [True, False])}
