"""Every mode against diffusers' own decode: bit for bit in time, 1e-5 in space, diffusers' tiles as tiles.

One set of four processes runs all cases; fewer ranks are its first ones. `make matrix` runs the long sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wanshim.core.decoding import parallelize_decode

from .ranks import made_together, run_ranks, values
from .tiny import LAYOUTS, make_latent, make_vae

SIZES = (1, 2, 3, 4)
# Frames and ranks, of `make test` and of `make slow`.
FEW = {("2.1", "float32"): ((1, 1), (2, 2)), ("2.2", "float32"): ((2, 3),)}
SOME = {
    ("2.1", "float32"): ((1, 1), (1, 3), (2, 2), (2, 4), (5, 3)),
    ("2.1", "bfloat16"): ((2, 2), (5, 3)),
    ("2.2", "float32"): ((1, 1), (2, 3), (2, 4)),
    ("2.2", "bfloat16"): ((2, 3),),
}


@dataclass(frozen=True)
class Case:
    """One decode; the latent is `frames` x 5 x 7, so no split of it is even."""

    layout: str
    dtype: str
    frames: int
    batch: int
    mode: str
    strict: bool
    ranks: int
    axis: str = "auto"

    @property
    def reference(self) -> Case:
        """The same decode by diffusers alone, in tiles where this one is."""
        mode = "tile" if self.mode == "tile" else "temporal"
        return replace(self, mode=mode, strict=True, ranks=1, axis="auto")

    @property
    def latent(self) -> torch.Tensor:
        return make_latent(self.frames, batch=self.batch, dtype=getattr(torch, self.dtype))


@dataclass(frozen=True)
class Result:
    """The worst of all ranks."""

    equal: bool
    difference: float
    mode: str


def cases(frames: tuple[int, ...]) -> list[Case]:
    grid = product(LAYOUTS, ("float32", "bfloat16"), product(frames, SIZES))
    return [case for layout, dtype, size in grid for case in cases_of(layout, dtype, *size)]


def chosen_cases(chosen: Mapping[tuple[str, str], Iterable[tuple[int, int]]]) -> list[Case]:
    """Every mode of each layout, though not with each pair of ranks and frames."""
    every = [case for made, sizes in chosen.items() for size in sizes for case in cases_of(*made, *size)]
    return [case for case in every if case.mode != "tile" or case.ranks == 3]


def cases_of(layout: str, dtype: str, frames: int, ranks: int) -> Iterator[Case]:
    batch = 2 if frames == 2 or (frames, layout) == (5, "2.1") else 1
    base = Case(layout, dtype, frames, batch, "temporal", True, ranks)
    yield base
    if dtype == "float32":
        yield replace(base, strict=False)
        yield replace(base, mode="spatial", axis="height" if frames == 5 else "auto")
        yield replace(base, mode="spatial", strict=False, axis="height" if frames == 2 else "auto")
    if frames <= 5 and (dtype == "float32" or ranks == 3):  # the number of ranks changes no tile's numbers
        yield replace(base, mode="tile")


def run_cases(rank: int, size: int, todo: list[Case]) -> dict[Case, tuple[bool, float, str]]:
    groups = {n: dist.new_group(list(range(n))) for n in SIZES if n <= size}
    made = cache(make_vae)

    def vae_of(case: Case) -> Any:
        vae = made(case.layout, getattr(torch, case.dtype))
        pixels = 16 if case.layout == "2.2" else 8
        vae.enable_tiling(4 * pixels, 4 * pixels, 3 * pixels, 3 * pixels)
        vae.use_tiling = case.mode == "tile"
        return vae

    references = made_together((case.reference for case in todo), lambda case: vae_of(case).decode(case.latent).sample)
    done = {}
    for case in todo:
        if rank >= case.ranks:
            continue
        vae = vae_of(case)
        handle = parallelize_decode(vae, groups[case.ranks], mode=case.mode, strict=case.strict, axis=case.axis)
        out = vae.decode(case.latent).sample
        assert handle.plan is not None
        mode = handle.plan.mode
        handle.remove()
        reference = references[case.reference]
        done[case] = (torch.equal(out, reference), (out.float() - reference.float()).abs().max().item(), mode)
    return done


def run_all(todo: list[Case], seconds: float) -> dict[Case, Result]:
    ranks = values(run_ranks(run_cases, max(SIZES), todo, seconds=seconds))
    merged = {}
    for case in todo:
        told = [done[case] for done in ranks if case in done]
        assert len(told) == case.ranks
        merged[case] = Result(all(t[0] for t in told), max(t[1] for t in told), told[0][2])
    return merged


@pytest.fixture(scope="module", params=[FEW, pytest.param(SOME, marks=pytest.mark.slow)], ids=["few", "some"])
def results(request: pytest.FixtureRequest) -> dict[Case, Result]:
    return run_all(chosen_cases(request.param), 240)


def check(found: dict[Case, Result], mode: str, strict: bool) -> list[Result]:
    chosen = {case: result for case, result in found.items() if case.mode == mode and case.strict == strict}
    assert chosen
    for case, result in chosen.items():
        if strict and mode in ("temporal", "tile"):
            assert result.equal, f"{case}: differs by {result.difference}"
        else:
            assert result.difference <= 1e-5, f"{case}: differs by {result.difference}"
    return list(chosen.values())


def test_temporal_strict_equals_diffusers_bit_for_bit(results: dict[Case, Result]) -> None:
    assert {result.mode for result in check(results, "temporal", True)} == {"single", "temporal"}


def test_spatial_strict_is_within_tolerance_of_diffusers(results: dict[Case, Result]) -> None:
    assert {result.mode for result in check(results, "spatial", True)} == {"single", "spatial"}


def test_temporal_fast_is_within_tolerance_of_diffusers(results: dict[Case, Result]) -> None:
    check(results, "temporal", False)


def test_spatial_fast_is_within_tolerance_of_diffusers(results: dict[Case, Result]) -> None:
    check(results, "spatial", False)


def test_tile_equals_diffusers_tiled_bit_for_bit(results: dict[Case, Result]) -> None:
    assert {result.mode for result in check(results, "tile", True)} == {"tile"}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_every_mode_with_all_numbers_of_ranks_and_frames_holds_its_promise() -> None:
    found = run_all(cases((1, 2, 5, 7, 21)), 1700)
    for mode, strict in (("temporal", True), ("spatial", True), ("temporal", False), ("spatial", False)):
        check(found, mode, strict)
