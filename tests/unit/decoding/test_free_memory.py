"""What is chosen on a card with little memory left: a 720p video by both VAEs, decoded and encoded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from wanshim.core.decoding import Graph, read_graph
from wanshim.core.decoding.plan import VaeJob, VaePlan
from wanshim.core.decoding.planner import make_plans
from wanshim.errors import ModelInvalid

from .graphs import LATENTS, full, released

GIB = 2**30
FREE = (8, 12, 16, 24)


@cache
def graph(layout: str, verb: str) -> Graph:
    if verb == "decode":
        return full(layout)
    with torch.device("meta"):
        return read_graph(released(layout), "encode")


def job(layout: str, verb: str, free: float, **options: object) -> VaeJob:
    latent = LATENTS[layout] if verb == "decode" else (1, 3, *LATENTS[layout][2:])
    made = VaeJob(latent=latent, itemsize=2, ranks=1, strict=False, by_winograd=verb == "decode", free=int(free * GIB))
    return replace(made, **options)  # type: ignore[arg-type]


def plans_of(built: Graph, asked: VaeJob) -> tuple[tuple[VaePlan, ...], str]:
    """The plans, or none and why."""
    try:
        return make_plans(built, asked), ""
    except ModelInvalid as refused:
        return (), str(refused)


@pytest.mark.parametrize("free", FREE)
@pytest.mark.parametrize("verb", ["decode", "encode"])
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
def test_every_mode_runs_by_a_plan_that_fits_or_is_refused_with_the_bytes(layout: str, verb: str, free: int) -> None:
    modes = ("auto", "temporal", "spatial", *(["tile"] if verb == "decode" else []))
    for mode in modes:
        for ranks in (1, 2, 4):
            for strict in (False, True):
                asked = job(layout, verb, free, mode=mode, ranks=ranks, strict=strict, strict_cuda=strict)
                plans, refusal = plans_of(graph(layout, verb), replace(asked, by_winograd=not strict))
                assert all(max(plan.peak) <= 0.92 * free * GIB for plan in plans)
                if not plans:
                    assert (
                        f"fits: {free}.00 GiB free on the fullest rank, {0.92 * free:.2f} of it for a plan, " in refusal
                    )
                    # whole layers of a rank's frames in time, or the framework's bits in space
                    assert mode == "temporal" or (strict and mode == "auto") or ranks == 1


@pytest.mark.parametrize("verb", ["decode", "encode"])
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
def test_fast_auto_runs_with_each_size_of_free_memory_and_takes_larger_chunks_where_they_fit(
    layout: str, verb: str
) -> None:
    for ranks in (1, 2, 4):
        costs = [make_plans(graph(layout, verb), job(layout, verb, free, ranks=ranks))[0].cost for free in FREE]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("free", [12, 16, 24])
@pytest.mark.parametrize("verb", ["decode", "encode"])
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
def test_strict_auto_runs_from_twelve_gib_on(layout: str, verb: str, free: int) -> None:
    for ranks in (1, 2, 4):
        asked = job(layout, verb, free, ranks=ranks, strict=True, strict_cuda=True, by_winograd=False)
        assert make_plans(graph(layout, verb), asked)[0].exactness == "strict"
