"""Strategies over launches and what fits: which is taken, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanshim.core.strategy import MicroBatch, Request, Stored, Strategy, TrainingJob
from wanshim.core.strategy.choice import bound, choose, explain
from wanshim.errors import PlacementInvalid

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
        words={"processes": "accelerate launch --num_processes {value}", "low_precision": "BASE", "offload": "OFFLOAD"},
    )


def said(taken: Strategy, of: TrainingJob, fits: dict[Strategy, bool]) -> str:
    reason, alternatives = explain(taken, of, fits)
    return " ".join([reason, *map(str, alternatives)])


@pytest.mark.parametrize(
    ("launch", "fits", "taken"),
    [
        (job(4, 2), {Strategy.RESIDENT: True, Strategy.STREAM: True}, Strategy.RESIDENT),
        (job(4, 2), ALL_BUT_RESIDENT, Strategy.STREAM),
        (job(1, 1, gpus=1), ALL_BUT_RESIDENT, Strategy.STREAM),
        (job(4, 1), ALL_BUT_RESIDENT, Strategy.PIPELINE),
        (job(1, 1), ALL_BUT_RESIDENT, Strategy.SPLIT),
        (replace(job(4, 1), excluded={Strategy.PIPELINE: "it draws"}), ALL_BUT_RESIDENT, Strategy.SPLIT),
        (replace(job(4, 1), request=Request(strategy=Strategy.SPLIT)), ALL_BUT_RESIDENT, Strategy.SPLIT),
        (replace(job(1, 2), processes=2), {Strategy.SEQUENCE: True}, Strategy.SEQUENCE),
        (replace(job(1, 2), processes=2), {Strategy.SEQUENCE: True, Strategy.STREAM: True}, Strategy.STREAM),
    ],
    ids=["it fits each GPU", "it does not", "one GPU", "accumulation", "no accumulation", "excluded", "asked",
         "nothing else fits", "something else fits"],
)  # fmt: skip
def test_first_strategy_that_can_run_is_taken(launch: TrainingJob, fits: dict[Strategy, bool], taken: Strategy) -> None:
    assert choose(launch, fits) is taken


def test_bounds_are_those_of_the_launch() -> None:
    assert [bound(strategy, job(4, 1)) for strategy in Strategy] == [2.0, 2.0, 1.6, 1.0, 2.0]
    assert bound(Strategy.RESIDENT, job(4, 1, gpus=4)) == 4.0


def test_one_process_with_accumulation_gets_a_pipeline_and_learns_of_ranks() -> None:
    text = said(Strategy.PIPELINE, job(4, 1), ALL_BUT_RESIDENT)
    assert text.startswith("It gives at most 1.60x of one GPU's samples a second. ")
    assert "Split: at most 1.00x." in text
    assert "accelerate launch --num_processes 2 would reach 2.00x at most" in text


def test_one_process_without_accumulation_gets_room_and_not_speed() -> None:
    text = said(Strategy.SPLIT, job(1, 1), ALL_BUT_RESIDENT)
    assert "room, not speed" in text
    assert "gradient accumulation is 1" in text


def test_requested_strategy_that_cannot_run_is_refused_with_the_reason() -> None:
    stream = replace(job(4, 1), request=Request(strategy=Strategy.STREAM))
    with pytest.raises(PlacementInvalid, match="plan stream: needs a process for each of 2 GPUs"):
        choose(stream, ALL_BUT_RESIDENT)


def test_excluded_strategy_is_reported_with_its_reason() -> None:
    excluded = replace(job(4, 1), excluded={Strategy.PIPELINE: "blocks draw random numbers"})
    assert "Pipeline: blocks draw random numbers." in said(Strategy.SPLIT, excluded, ALL_BUT_RESIDENT)


def test_nothing_that_fits_is_reported_for_every_strategy_with_what_is_not_done_yet() -> None:
    with pytest.raises(PlacementInvalid, match="resident: does not fit the devices; stream: does not fit") as raised:
        choose(job(1, 2), {})
    assert raised.value.hint == "What may help: fewer frames; BASE; more GPUs"  # checkpoints were offloaded unasked
    refused = replace(job(1, 2), request=Request(offload=False))
    with pytest.raises(PlacementInvalid, match="; it lacks 3 GiB") as raised:
        choose(refused, {}, lambda: ("it lacks 3 GiB", "9 frames"))
    assert raised.value.hint == "What may help: 9 frames; BASE; OFFLOAD; more GPUs"
    with pytest.raises(PlacementInvalid) as raised:
        choose(replace(job(1, 2), words={}, request=Request(offload=True)), {})
    assert raised.value.hint == "What may help: fewer frames; more GPUs"


def test_requested_plan_says_that_it_was_asked_for() -> None:
    asked = replace(job(4, 1), request=Request(strategy=Strategy.SPLIT))
    assert explain(Strategy.SPLIT, asked, ALL_BUT_RESIDENT)[0].startswith("It was asked for. ")


def test_process_beside_others_or_with_one_gpu_has_no_pipeline() -> None:
    two, one = job(4, 2), job(4, 1, gpus=1)
    assert "Pipeline: 2 processes were launched, and each would need several GPUs." in said(
        Strategy.STREAM, two, ALL_BUT_RESIDENT
    )
    assert "Pipeline: there is one GPU." in said(Strategy.STREAM, one, ALL_BUT_RESIDENT)
