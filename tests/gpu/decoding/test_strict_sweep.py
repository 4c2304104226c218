"""A short sweep of what users may vary; `strict_sweep.py` runs as long as it is told."""

from __future__ import annotations

import pytest


@pytest.mark.gpu(1)
@pytest.mark.timeout(600)
def test_strict_is_equal_or_says_that_it_is_not() -> None:
    from .strict_sweep import sweep

    outcomes: list[str] = []
    sweep(7, 60, lambda case, outcome: outcomes.append(outcome))
    assert outcomes.count("equal") > 0.9 * len(outcomes)


@pytest.mark.gpu(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
@pytest.mark.parametrize(("height", "width", "frames"), [(2, 7, 4), (2, 7, 9), (2, 3, 4)])
def test_few_outputs_show_that_an_engine_adds_in_another_order(
    layout: str, height: int, width: int, frames: int
) -> None:
    """Later frames of the first of these differed, found by the sweep: too few outputs were compared."""
    from .strict_sweep import Case, outcome

    surroundings = {"memory": "contiguous", "autocast": False, "inference": False, "engines": True, "wide": False}
    assert outcome(Case(layout, "encode", "bfloat16", 1, frames, height, width, **surroundings)) == "equal"
