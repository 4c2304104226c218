"""Whose random numbers the stages of a split draw. The generators of GPUs are doubles: a CPU has one for all."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch

from wanshim.core.model_split import split_model
from wanshim.core.model_split.draws import Draws

from .model import Model

HOME, OTHER, THIRD = (torch.device("cuda", i) for i in range(3))


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, torch.Tensor]:
    states = {device: torch.tensor([100 * i]) for i, device in enumerate((HOME, OTHER, THIRD))}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state.clone()}))
    return states


def test_stages_draw_in_turn_from_the_generator_of_the_home_device(
    generators: dict[torch.device, torch.Tensor],
) -> None:
    draws, seen = Draws(HOME), []
    places = [HOME, OTHER, THIRD, OTHER, HOME]
    for _ in range(2):
        for source, target in pairwise(places):
            seen.append(generators[source].item())
            generators[source] += 1  # as dropout does
            draws.carry(source, target)
        generators[HOME] += 10  # as the noise of the next step does
    assert seen == [0, 1, 2, 3, 14, 15, 16, 17]
    assert [generators[device].item() for device in (HOME, OTHER, THIRD)] == [28, 100, 200]


def test_stages_that_draw_nothing_leave_what_another_thread_drew_meanwhile(
    generators: dict[torch.device, torch.Tensor],
) -> None:
    draws = Draws(HOME)
    draws.carry(HOME, OTHER)
    generators[HOME] += 5
    draws.carry(OTHER, HOME)
    assert [generators[device].item() for device in (HOME, OTHER)] == [5, 100]


def test_forward_that_failed_on_its_way_changes_no_other_generator(
    generators: dict[torch.device, torch.Tensor],
) -> None:
    draws = Draws(HOME)
    draws.carry(HOME, OTHER)
    for source, target in ((HOME, OTHER), (OTHER, HOME)):
        draws.carry(source, target)
    assert generators[OTHER].item() == 100


def test_stage_alone_leaves_the_home_device_s_generator(generators: dict[torch.device, torch.Tensor]) -> None:
    """A step cache passes over the blocks, and computes the head behind them."""
    Draws(HOME).carry(OTHER, HOME)
    assert [generators[device].item() for device in (HOME, OTHER)] == [0, 100]


def test_backward_and_overlapping_micro_batches_carry_nothing(generators: dict[torch.device, torch.Tensor]) -> None:
    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
            draws.carry(HOME, OTHER)
            return gradient

    draws = Draws(HOME)
    Recomputed.apply(torch.ones(1, requires_grad=True)).sum().backward()
    draws.are_carried = False
    draws.carry(HOME, OTHER)
    assert generators[OTHER].item() == 100


def test_boundaries_of_a_split_carry_until_it_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[torch.device, torch.device]] = []
    monkeypatch.setattr(Draws, "carry", lambda _, *devices: found.append(devices))
    model, x = Model(), torch.randn(3, 4)
    handle = split_model(model, ["cpu", "cpu"])
    model(x, {})
    assert found == [(torch.device("cpu"),) * 2] * 2  # to the second stage, and home
    copy.deepcopy(model.body["layers"][handle.plan.stages[0].last - 1])(x, x.mean(), {})  # a block alone has its hooks
    assert len(found) == 3
    handle.remove()
    model(x, {})
    assert len(found) == 3
