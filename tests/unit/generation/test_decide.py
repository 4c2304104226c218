"""`decide` over jobs and limits: what is taken, what is rejected and why. No device is involved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from wanshim.core.generation import GenerationPlan
from wanshim.core.generation.decide import decide
from wanshim.core.generation.job import GenerationJob, Limits

GIB = 2**30
JOB = GenerationJob(
    pipeline="WanPipeline",
    devices=("cuda:0", "cuda:1", "cuda:2", "cuda:3"),
    heads=40,
    weights=28 * GIB,
    working=3 * GIB,
)


def way(plan: GenerationPlan) -> tuple[int, int]:
    return plan.guidance, plan.sequence


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, 2)),
        ({"devices": JOB.devices[:2]}, (2, 1)),
        ({"devices": JOB.devices[:1]}, (1, 1)),
        ({"devices": JOB.devices[:3]}, (1, 3)),
        ({"no_pair": "off"}, (1, 4)),
        ({"no_sequence": "not served"}, (2, 1)),
        ({"no_sequence": "not served", "no_pair": "off"}, (1, 1)),
        ({"heads": 1}, (2, 1)),
        ({"heads": 3, "no_pair": "off"}, (1, 3)),
        ({"at_most": (2, 1)}, (2, 1)),
        ({"at_most": (1, 3)}, (1, 3)),
        ({"at_most": (2, 2), "no_pair": "off"}, (1, 2)),
    ],
    ids=str,
)
def test_most_gpus_are_used_and_guidance_before_tokens(changes: dict[str, object], expected: tuple[int, int]) -> None:
    plan = decide(replace(JOB, **changes), Limits())
    assert way(plan) == expected
    assert len(plan.devices) == plan.gpus
    assert plan.devices[0] == "cuda:0"


def test_every_way_that_was_not_taken_has_its_reason() -> None:
    plan = decide(replace(JOB, no_pair="scale 1", no_sequence="no exchange"), Limits())
    assert plan.rejected == {
        "guidance over 2": "scale 1",
        "guidance over 2 x tokens over 2": "scale 1",
        "tokens over 2": "no exchange",
        "tokens over 3": "no exchange",
        "tokens over 4": "no exchange",
        "cuda:1": "no way to use it beside the others",
        "cuda:2": "no way to use it beside the others",
        "cuda:3": "no way to use it beside the others",
    }


def test_device_without_the_memory_is_passed_over() -> None:
    plan = decide(replace(JOB, no_sequence="no exchange"), Limits(available={"cuda:1": 30 * GIB, "cuda:2": 31 * GIB}))
    assert plan.devices == ("cuda:0", "cuda:2")
    assert plan.rejected["cuda:1"] == "31.00 GiB would be needed, 30.00 GiB are available"
    assert plan.peaks == {"cuda:0": 31 * GIB, "cuda:2": 31 * GIB}


def test_tokens_over_gpus_need_less_of_each() -> None:
    """A device that lacks the memory for whole forwards has it for a part of one."""
    plan = decide(JOB, Limits(available=dict.fromkeys(JOB.devices[1:], 30 * GIB)))
    assert way(plan) == (2, 2)
    plan = decide(replace(JOB, devices=JOB.devices[:2]), Limits(available={"cuda:1": 30 * GIB}))
    assert way(plan) == (1, 2)
    assert plan.rejected["guidance over 2"] == "2 GPUs with memory for it would be needed, 1 are there"
    plan = decide(JOB, Limits(available={"cuda:1": 28 * GIB, "cuda:2": 40 * GIB, "cuda:3": 40 * GIB}))
    assert plan.devices == ("cuda:0", "cuda:2", "cuda:3")
    assert plan.rejected["cuda:1"] == "29.75 GiB would be needed, 28.00 GiB are available"


def test_more_gpus_need_no_less_of_each_than_two() -> None:
    """Before and behind the blocks each has all tokens, almost half of what a whole forward needs."""
    many = replace(JOB, devices=tuple(f"cuda:{index}" for index in range(8)), at_most=(1, 8))
    two = decide(replace(many, devices=many.devices[:2]), Limits()).peaks["cuda:1"]
    assert JOB.working is not None
    assert two >= JOB.weights + 0.46 * JOB.working
    assert decide(many, Limits()).peaks == dict.fromkeys(many.devices, two)


@pytest.mark.parametrize(("size", "peak"), [("480x832x81", 28.93), ("720x1280x81", 31.47)])
def test_prediction_is_within_five_percent_of_the_record(size: str, peak: float) -> None:
    record = Path(__file__).parents[3] / f"benchmarks/results/generate_{size.split('x')[0]}p_2xH200.json"
    rows = {row["arm"]: row for row in json.loads(record.read_text())["rows"]}
    assert rows["sequence:2"]["peak_GiB"][0] == pytest.approx(peak, abs=0.01)
    weights = round(rows["sequence:2"]["weights_GB"] * 1e9)
    whole = round(rows["cfg:2"]["predicted_GiB"][0] * GIB)
    job = replace(JOB, devices=JOB.devices[:2], at_most=(1, 2), weights=weights, working=whole - weights)
    assert decide(job, Limits()).peaks["cuda:0"] / GIB == pytest.approx(peak, rel=0.05)
    assert whole / GIB == pytest.approx(rows["cfg:2"]["peak_GiB"][0], rel=0.05)


def test_plan_prints_itself() -> None:
    plan = decide(replace(JOB, devices=JOB.devices[:2], no_sequence="no exchange"), Limits())
    assert str(plan).splitlines() == [
        "WanPipeline on cuda:0, cuda:1: guidance over 2, bit for bit the frames of one GPU",
        "  cuda:0: 31.00 GiB predicted for its forwards",
        "  cuda:1: 31.00 GiB predicted for its forwards",
        "  not tokens over 2: no exchange",
    ]


def test_plan_with_tokens_says_what_is_exact_and_what_rounds() -> None:
    halves = decide(JOB, Limits())
    assert str(halves).splitlines() == [
        "WanPipeline on cuda:0, cuda:1, cuda:2, cuda:3: guidance over 2 x tokens over 2, the frames of one GPU up to "
        "rounding (guidance over GPUs changes no bit, tokens over GPUs round in another order)",
        *(f"  cuda:{index}: 29.75 GiB predicted for its forwards" for index in range(4)),  # 28 + 3 / 2 * 1.17
    ]
    assert "guidance" not in str(decide(replace(JOB, no_pair="off"), Limits())).splitlines()[0]


def test_what_was_not_asked_for_is_rejected_by_that_name() -> None:
    plan = decide(replace(JOB, at_most=(1, 3)), Limits())
    assert plan.rejected["tokens over 4"] == "tokens over 3 was asked for"
    assert plan.rejected["guidance over 2 x tokens over 2"] == "tokens over 3 was asked for"
