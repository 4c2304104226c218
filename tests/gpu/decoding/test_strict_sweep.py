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
