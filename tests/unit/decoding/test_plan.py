"""The planner: what it picks, how it splits, what it prints, and its memory against what an H200 measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanshim import settings
from wanshim.core.decoding.modes import MODES
from wanshim.core.decoding.plan import VaeJob, even_split
from wanshim.core.decoding.planner import make_plans
from wanshim.errors import ModelInvalid

from .graphs import LATENTS, full

GIB = 2**30


def job(layout: str = "2.1", ranks: int = 2, strict: bool = False, **options: object) -> VaeJob:
    return replace(VaeJob(latent=LATENTS[layout], itemsize=2, ranks=ranks, strict=strict), **options)  # type: ignore[arg-type]


# benchmarks/results/vae_decode_2.1.json and _2.2.json: layout, ranks, strict, mode, chunk, measured GiB
MEASURED = [
    ("2.1", 1, True, "auto", None, 8.63),
    ("2.1", 1, False, "auto", 4, 12.53),
    ("2.1", 1, False, "auto", 8, 18.38),
    ("2.1", 2, True, "temporal", None, 19.49),
    ("2.1", 2, False, "temporal", None, 20.56),
    ("2.1", 2, False, "spatial", 4, 6.49),
    ("2.1", 2, False, "tile", 4, 1.56),
    ("2.1", 4, True, "temporal", None, 11.41),
    ("2.1", 4, False, "spatial", 4, 3.46),
    ("2.2", 1, True, "auto", None, 7.99),
    ("2.2", 1, False, "auto", 4, 12.72),
    ("2.2", 2, True, "temporal", None, 29.90),
    ("2.2", 2, False, "spatial", 4, 6.74),
    ("2.2", 2, False, "tile", 4, 1.90),
    ("2.2", 4, True, "temporal", None, 17.03),
    ("2.2", 4, False, "temporal", None, 18.24),
    ("2.2", 4, False, "spatial", 4, 3.70),
]


@pytest.mark.parametrize(("layout", "ranks", "strict", "mode", "chunk", "measured"), MEASURED)
def test_predicted_peak_is_within_ten_percent_of_the_measured(
    layout: str, ranks: int, strict: bool, mode: str, chunk: int | None, measured: float
) -> None:
    plan = make_plans(full(layout), job(layout, ranks, strict, mode=mode, chunk=chunk))[0]
    assert max(plan.peak) / GIB == pytest.approx(measured, rel=0.1)


def test_predicted_peak_counts_winograd_s_buffers() -> None:
    """benchmarks/results/vae_decode_2.2_1xH200.json."""
    plan = make_plans(full("2.2"), job("2.2", 1, by_winograd=True))[0]
    assert plan.by_winograd
    assert max(plan.peak) / GIB == pytest.approx(23.38, rel=0.03)


@pytest.mark.parametrize(("ranks", "free"), [(1, 8.0), (1, 3.4), (8, 2.5)])
def test_where_winograd_s_buffers_do_not_fit_the_plan_is_that_without_them(ranks: int, free: float) -> None:
    without = job("2.2", ranks, free=int(free * GIB))
    plan, *rest = make_plans(full("2.2"), replace(without, by_winograd=True))
    assert plan == make_plans(full("2.2"), without)[0]
    assert not plan.by_winograd
    assert all(max(each.peak) < max(plan.peak) for each in rest)


def test_winograd_is_used_where_it_fits_and_left_last_where_memory_runs_out() -> None:
    """Fewer latent frames per step cost 2 % of the time, convolutions without Winograd's method 40 %."""
    plans = make_plans(full("2.2"), job("2.2", 1, by_winograd=True))
    assert plans[0].cost < make_plans(full("2.2"), job("2.2", 1))[0].cost
    single = [plan for plan in plans if plan.mode == "single"]
    assert [plan.chunk for plan in single if plan.by_winograd] == [8, 4, 2, 1]
    assert [plan.by_winograd for plan in single] == sorted((plan.by_winograd for plan in single), reverse=True)
    assert not single[-1].by_winograd


@pytest.mark.parametrize(("free", "chunk"), [(12, 1), (16, 2), (24, 4), (40, 7)])
def test_plan_as_fast_that_leaves_room_is_preferred(free: int, chunk: int) -> None:
    """benchmarks/results/vae_memory_1xH200.json: 2 latent frames per step ran out within 12 GiB, 7 within 24."""
    free_bytes = int((0.98 * free) * GIB)
    plan = make_plans(full("2.1"), job(ranks=1, by_winograd=True, free=free_bytes))[0]
    assert (plan.mode, plan.by_winograd, plan.chunk) == ("single", True, chunk)
    assert max(plan.peak) <= 0.85 * free_bytes


def test_plan_that_leaves_no_room_is_taken_where_no_other_is_as_fast() -> None:
    only = job(ranks=1, strict=True)
    peak = max(make_plans(full("2.1"), only)[0].peak)
    assert make_plans(full("2.1"), replace(only, free=int(peak / 0.9)))[0].mode == "single"


def test_fallback_needs_clearly_less_memory_than_the_plan_before() -> None:
    """Without Winograd's buffers a decode of the 2.1 VAE needs 1 % less: that would end out of memory, too."""
    plans = make_plans(full("2.1"), job(ranks=1, by_winograd=True))
    peaks = [max(plan.peak) for plan in plans]
    assert len(plans) > 3
    assert all(after <= 0.95 * before for before, after in pairwise(peaks))


def test_auto_strict_never_leaves_bit_identity() -> None:
    plans = make_plans(full("2.1"), job(strict=True))
    assert [plan.mode for plan in plans] == ["temporal", "single"]
    assert {plan.exactness for plan in plans} == {"strict"}


def test_auto_picks_a_plan_that_fits_the_fullest_rank() -> None:
    graph = full("2.1")
    assert make_plans(graph, job(free=80 * GIB))[0].mode == "temporal"
    tight = make_plans(graph, job(free=8 * GIB))[0]
    assert tight.mode == "spatial"
    assert max(tight.peak) <= 8 * GIB
    assert make_plans(graph, job(free=2 * GIB))[0].mode == "tile"


def test_plan_that_would_fill_the_free_memory_is_not_taken() -> None:
    """The allocator fragments: 8 % stay unused, for a plan asked for by name too."""
    graph = full("2.1")
    peak = max(make_plans(graph, job(mode="tile", chunk=4))[0].peak)
    assert make_plans(graph, job(mode="tile", chunk=4, free=int(peak / 0.91)))[0].mode == "tile"
    with pytest.raises(ModelInvalid, match=r"no decode of .* fits"):
        make_plans(graph, job(mode="tile", chunk=4, free=int(peak / 0.93)))


def test_auto_nothing_fits_says_what_was_free_and_what_each_plan_needs() -> None:
    with pytest.raises(ModelInvalid, match=r"no decode of .* fits: 0\.10 GiB free .* temporal .* GiB"):
        make_plans(full("2.1"), job(free=GIB // 10))


def test_fallbacks_need_less_memory_each() -> None:
    peaks = [max(plan.peak) for plan in make_plans(full("2.2"), job("2.2", 4))]
    assert len(peaks) > 2
    assert peaks == sorted(peaks, reverse=True)


def test_lean_auto_prefers_the_least_memory_and_shares_the_work() -> None:
    for strict in (True, False):
        plan = make_plans(full("2.1"), job(strict=strict, lean=True))[0]
        assert plan.mode == "spatial"
        assert plan.chunk == 1


def test_active_ranks_leave_the_others_without_work() -> None:
    plan = make_plans(full("2.1"), job(ranks=4, active=2, mode="spatial"))[0]
    assert plan.split == ((0, 80), (80, 160), (160, 160), (160, 160))


def test_plan_prints_mode_split_peak_and_reason() -> None:
    plan = make_plans(full("2.1"), job(ranks=4, strict=True, mode="temporal"))[0]
    lines = str(plan).splitlines()
    assert lines[0] == "temporal on 4 ranks, strict, not compared"
    assert lines[1] == "  split    6 + 5 + 5 + 5 latent frames; 1 latent frame per step"
    assert "GiB predicted per rank" in lines[2]
    assert lines[3].startswith("  why      ")
    assert "\n  memory   3.00, 0.50 GiB predicted" in str(replace(plan, peak=(3 * GIB, GIB // 2)))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "fast"])
@pytest.mark.parametrize("mode", settings.VAE_MODES[:-1])
def test_plan_promises_nothing_that_was_not_compared(mode: str, strict: bool) -> None:
    plans = make_plans(full("2.1"), job(strict=strict, mode=mode, lean=mode == "auto"))
    for plan in plans:
        bits = strict and plan.mode in ("temporal", "single")
        assert plan.claim in (
            ["strict, not compared"]
            if bits
            else ["within tolerance", "approximate"]
            if not strict
            else ["within tolerance, not compared", "approximate, not compared"]
        )
        assert not any(word in f"{plan} {plan!r}" for word in ("bit-identical", "exact,", "exactly"))


def test_every_parallel_mode_can_be_set_by_the_user() -> None:
    assert {name for name, mode in MODES.items() if mode.parallel} == set(settings.VAE_MODES) - {"auto", "off"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "zeitlich"}, "decode mode 'zeitlich'"),
        ({"mode": "single"}, "one of auto, temporal, spatial, tile"),
        ({"axis": "depth"}, "spatial axis 'depth'"),
    ],
)
def test_job_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelInvalid, match=message):
        make_plans(full("2.1"), job(**change))


@given(st.integers(0, 400), st.integers(1, 17))
def test_even_split_covers_everything_once_and_differs_by_one(length: int, parts: int) -> None:
    runs = even_split(length, parts)
    sizes = [stop - start for start, stop in runs]
    assert len(runs) == parts
    assert runs[0][0] == 0
    assert runs[-1][1] == length
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
