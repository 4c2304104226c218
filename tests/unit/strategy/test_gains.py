"""Strategies compared over cards, links, lengths and accumulation: which is taken, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wanshim.core.strategy import MicroBatch, Request, Stored, Strategy, TrainingJob
from wanshim.core.strategy import speeds as speeds_module
from wanshim.core.strategy.gains import Comparison, Workload, compare, gain
from wanshim.core.strategy.speeds import Speeds, measure_speeds
from wanshim.errors import PlacementInvalid

# dense bf16 TFLOP/s of the cards
CARDS = {"3090": 71e12, "4090": 165e12, "5090": 210e12}
ALL_BUT_RESIDENT = {Strategy.STREAM: True, Strategy.PIPELINE: True, Strategy.SPLIT: True}


def job(accumulation: int, processes: int, gpus: int = 2) -> TrainingJob:
    """One process over a split of all GPUs, or a process on each."""
    split = processes < gpus
    return TrainingJob(
        devices=tuple(f"cuda:{i}" for i in range(gpus)) if split else ("cuda:0",),
        split_points=(20,) if split else None,
        blocks=(Stored(0),),
        home=Stored(0),
        video=None,
        micro_batch=lambda tokens, chunk: MicroBatch(0, 0, 0, 0),
        accumulation=accumulation,
        local_processes=processes,
        words={"processes": "accelerate launch --num_processes {value}"},
    )


def work(tokens: int) -> Workload:
    return Workload(
        tokens=tokens,
        num_blocks=40,
        block_parameters=351_300_000,
        dim=5120,
        frozen_bytes=28_100_000_000,
        streamed_share=0.5,
    )


def said(found: Comparison) -> str:
    return " ".join([found.reason, *map(str, found.alternatives)])


def test_step_of_the_14b_has_the_operations_counted_for_it() -> None:
    assert work(20_280).forward_flops + work(20_280).backward_flops == pytest.approx(3.04e15, rel=0.1)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("link", [6e9, 12e9, 25e9])
@pytest.mark.parametrize("tokens", [1_000, 20_280, 75_600])
def test_streaming_hides_where_the_video_is_long_and_not_for_an_image(card: str, link: float, tokens: int) -> None:
    speeds = Speeds(link, CARDS[card])
    found = compare(job(1, 2), work(tokens), speeds, {Strategy.STREAM: True})
    assert found.strategy is Strategy.STREAM
    hides = tokens > 1_000 or (card, link) == ("3090", 25e9)  # the slowest card on the fastest link
    assert (gain(Strategy.STREAM, job(1, 2), work(tokens), speeds) == pytest.approx(2.0)) is hides
    assert ("does not hide" in said(found)) is not hides


@pytest.mark.parametrize("card", CARDS)
def test_image_over_a_slow_link_streams_slower_than_a_pipeline_would_run(card: str) -> None:
    speeds = Speeds(6e9, CARDS[card])
    assert gain(Strategy.STREAM, job(4, 2), work(1_000), speeds) < 1.6
    assert gain(Strategy.PIPELINE, job(4, 1), work(1_000), speeds) == 1.6


def test_one_process_with_accumulation_gets_a_pipeline_and_learns_of_ranks() -> None:
    found = compare(job(4, 1), work(20_280), Speeds(25e9, CARDS["4090"]), ALL_BUT_RESIDENT)
    assert found.strategy is Strategy.PIPELINE
    assert {one.strategy: one.gain for one in found.alternatives}[Strategy.SPLIT] == 1.0
    assert "accelerate launch --num_processes 2 would reach 2.00x" in said(found)


def test_one_process_without_accumulation_gets_room_and_not_speed() -> None:
    found = compare(job(1, 1), work(20_280), Speeds(25e9, CARDS["4090"]), ALL_BUT_RESIDENT)
    assert found.strategy is Strategy.SPLIT
    assert "room, not speed" in said(found)
    assert "gradient accumulation is 1" in said(found)


def test_model_that_fits_each_gpu_is_not_streamed() -> None:
    fits = {Strategy.RESIDENT: True, Strategy.STREAM: True}
    found = compare(job(1, 2), work(20_280), Speeds(25e9, CARDS["5090"]), fits)
    assert found.strategy is Strategy.RESIDENT


def test_strategy_the_user_requests_stands_if_it_can_run() -> None:
    speeds = Speeds(25e9, CARDS["4090"])
    split, stream = (replace(job(4, 1), request=Request(strategy=s)) for s in (Strategy.SPLIT, Strategy.STREAM))
    assert compare(split, work(1_000), speeds, ALL_BUT_RESIDENT).strategy is Strategy.SPLIT
    with pytest.raises(PlacementInvalid, match="plan stream: needs a process for each of 2 GPUs"):
        compare(stream, work(1_000), speeds, ALL_BUT_RESIDENT)


def test_excluded_strategy_is_reported_with_its_reason() -> None:
    excluded = replace(job(4, 1), excluded={Strategy.PIPELINE: "blocks draw random numbers"})
    found = compare(excluded, work(20_280), Speeds(25e9, CARDS["4090"]), ALL_BUT_RESIDENT)
    assert found.strategy is Strategy.SPLIT
    assert "Pipeline: blocks draw random numbers." in said(found)


def test_nothing_that_fits_is_reported_for_every_strategy() -> None:
    with pytest.raises(PlacementInvalid, match="resident: does not fit the devices; stream: does not fit") as raised:
        compare(job(1, 2), work(75_600), Speeds(25e9, CARDS["3090"]), {})
    assert "fp8" in str(raised.value)


def test_measuring_leaves_the_random_draws_of_the_program_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    speeds = measure_speeds.__wrapped__(torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)
    assert speeds.link > 0
    assert speeds.flops > 0


def test_speeds_are_those_of_the_fastest_run_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [0.25, 4.0, 2.0, 1.0, 8.0, 3.0] * 2  # the first of each six is the warm-up
    clock = iter([instant for seconds in durations for instant in (0.0, seconds)])
    monkeypatch.setattr(speeds_module.time, "perf_counter", lambda: next(clock))
    measured = measure_speeds.__wrapped__(torch.device("cpu"))
    assert measured == Speeds(link=2.0**22, flops=2.0 * 512**3)
    assert str(Speeds(link=25.04e9, flops=164.6e12)) == "link 25.0 GB/s, 165 TFLOP/s"


def test_requested_plan_says_that_it_was_asked_for() -> None:
    asked = replace(job(4, 1), request=Request(strategy=Strategy.SPLIT))
    assert compare(asked, work(1_000), Speeds(25e9, 1e14), ALL_BUT_RESIDENT).reason.startswith("It was asked for. ")


def test_process_beside_others_or_with_one_gpu_has_no_pipeline() -> None:
    two = compare(job(4, 2), work(20_280), Speeds(25e9, 1e14), ALL_BUT_RESIDENT)
    one = compare(job(4, 1, gpus=1), work(20_280), Speeds(25e9, 1e14), ALL_BUT_RESIDENT)
    assert "Pipeline: 2 processes were launched, and each would need several GPUs." in said(two)
    assert "Pipeline: there is one GPU." in said(one)


def test_one_gpu_alone_can_stream() -> None:
    found = compare(job(1, 1, gpus=1), work(20_280), Speeds(25e9, CARDS["4090"]), ALL_BUT_RESIDENT)
    assert found.strategy is Strategy.STREAM
