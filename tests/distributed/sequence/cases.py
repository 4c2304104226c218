"""The comparisons with the unsharded step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from .tiny import Case

SIZES = (2, 3, 4)


EXACT = 2e-5


def quick() -> list[Case]:
    ways = product(SIZES, ("none", "saved", "reentrant"), (Case(batch=2, per_token=True), Case(heads=12, tokens=24)))
    cases = [replace(case, ranks=ranks, checkpointing=way) for ranks, way, case in ways]
    cases += [replace(case, trained="blocks") for case in cases[::4]]
    cases += [Case(ranks=ranks, accumulation=3, checkpointing="saved") for ranks in SIZES]
    cases += [Case(ranks=4, tokens=4), Case(ranks=4, heads=4, tokens=5), Case(ranks=3, heads=40, tokens=61)]
    return cases
