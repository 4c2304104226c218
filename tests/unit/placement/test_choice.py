"""The planner over cards, links, lengths and accumulation: which plan, and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wanshim.core.strategy.decide import Job, Plan, choose, gain
from wanshim.core.strategy.speeds import Speeds, measure_speeds
from wanshim.errors import PlacementInvalid

# dense bf16 TFLOP/s of the cards
CARDS = {"3090": 71e12, "4090": 165e12, "5090": 210e12}
ALL_BUT_RESIDENT = {Plan.STREAM: True, Plan.LANES: True, Plan.SPLIT: True}


def job(tokens: int, accumulation: int, processes: int) -> Job:
    return Job(tokens, 40, 351_300_000, 5120, 28_100_000_000, 0.5, accumulation, gpus=2, processes=processes)


def test_step_of_the_14b_has_the_operations_counted_for_it() -> None:
    step = job(20_280, 1, 2)
    assert step.forward_flops + step.backward_flops == pytest.approx(3.04e15, rel=0.1)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("link", [6e9, 12e9, 25e9])
@pytest.mark.parametrize("tokens", [1_000, 20_280, 75_600])
def test_streaming_hides_where_the_video_is_long_and_not_for_an_image(card: str, link: float, tokens: int) -> None:
    found = choose(job(tokens, 1, 2), Speeds(link, CARDS[card]), {Plan.STREAM: True})
    assert found.plan is Plan.STREAM
    hides = tokens > 1_000 or (card, link) == ("3090", 25e9)  # the slowest card on the fastest link
    assert (found.gains[Plan.STREAM] == pytest.approx(2.0)) is hides
    assert ("does not hide" in str(found)) is not hides


@pytest.mark.parametrize("card", CARDS)
def test_image_over_a_slow_link_streams_slower_than_lanes_would_run(card: str) -> None:
    speeds = Speeds(6e9, CARDS[card])
    assert gain(Plan.STREAM, job(1_000, 4, 2), speeds) < gain(Plan.LANES, job(1_000, 4, 1), speeds) == 1.6


def test_one_process_with_accumulation_gets_lanes_and_is_told_of_ranks() -> None:
    found = choose(job(20_280, 4, 1), Speeds(25e9, CARDS["4090"]), ALL_BUT_RESIDENT)
    assert found.plan is Plan.LANES
    assert found.gains == {Plan.LANES: 1.6, Plan.SPLIT: 1.0}
    assert "accelerate launch --num_processes 2 would reach 2.00x" in str(found)


def test_one_process_without_accumulation_gets_room_and_not_speed() -> None:
    found = choose(job(20_280, 1, 1), Speeds(25e9, CARDS["4090"]), ALL_BUT_RESIDENT)
    assert found.plan is Plan.SPLIT
    assert "room, not speed" in str(found)
    assert "gradient accumulation is 1" in str(found)


def test_model_that_fits_each_gpu_is_not_streamed() -> None:
    found = choose(job(20_280, 1, 2), Speeds(25e9, CARDS["5090"]), {Plan.RESIDENT: True, Plan.STREAM: True})
    assert found.plan is Plan.RESIDENT


def test_plan_the_user_wants_stands_if_it_can_run() -> None:
    speeds = Speeds(25e9, CARDS["4090"])
    assert choose(job(1_000, 4, 1), speeds, ALL_BUT_RESIDENT, wanted=Plan.SPLIT).plan is Plan.SPLIT
    with pytest.raises(PlacementInvalid, match="plan stream: needs a process for each of 2 GPUs"):
        choose(job(1_000, 4, 1), speeds, ALL_BUT_RESIDENT, wanted=Plan.STREAM)


def test_nothing_that_fits_is_said_of_every_plan() -> None:
    with pytest.raises(PlacementInvalid, match="resident: does not fit the devices; stream: does not fit") as raised:
        choose(job(75_600, 1, 2), Speeds(25e9, CARDS["3090"]), {})
    assert "fp8" in str(raised.value)


def test_measuring_leaves_the_random_draws_of_the_program_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    speeds = measure_speeds.__wrapped__(torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)
    assert speeds.link > 0
    assert speeds.flops > 0


def test_one_gpu_alone_can_stream() -> None:
    alone = replace(job(20_280, 1, 1), gpus=1)
    assert choose(alone, Speeds(25e9, CARDS["4090"]), ALL_BUT_RESIDENT).plan is Plan.STREAM
