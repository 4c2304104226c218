"""Encode in both modes against diffusers' own: bit for bit in time, 1e-5 in space.

One set of four processes runs all cases; fewer ranks are its first ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wanshim.core.decoding import parallelize_decode, parallelize_encode
from wanshim.core.decoding.operators.base import StrictOperators
from wanshim.errors import RankDisagreement

from .ranks import made_together, run_ranks, values
from .tiny import LAYOUTS, encode, make_latent, make_vae, make_video

SIZES = (1, 2, 3, 4)
# frames, height and width: one image; a frame left over (7); fewer chunks than ranks; odd latent sizes; a last column
# of pixels that belongs to no latent one (2.1 alone takes it)
VIDEOS = {
    "2.1": ((1, 40, 56), (5, 40, 56), (7, 24, 44), (17, 24, 40)),
    "2.2": ((1, 80, 112), (9, 48, 80), (17, 32, 48)),
}


@dataclass(frozen=True)
class Case:
    layout: str
    dtype: str
    video: tuple[int, int, int]
    mode: str
    strict: bool
    ranks: int
    axis: str = "auto"

    @property
    def batch(self) -> int:
        return 2 if self.video[0] == 5 else 1

    @property
    def reference(self) -> Case:
        """The same encode by diffusers alone."""
        return replace(self, mode="temporal", strict=True, ranks=1, axis="auto")

    @property
    def pixels(self) -> torch.Tensor:
        return make_video(*self.video, batch=self.batch, dtype=getattr(torch, self.dtype))


@dataclass(frozen=True)
class Result:
    """The worst of all ranks."""

    equal: bool
    difference: float
    mode: str


def cases(*, every: bool) -> list[Case]:
    """Each mode with each video and each number of ranks, `every` of their pairs or each once or twice."""
    found: list[Case] = []
    for layout, ranks in product(LAYOUTS, SIZES):
        for number, video in enumerate(VIDEOS[layout]):
            if not every and (number + ranks) % 3:
                continue
            found += [Case(layout, dtype, video, "temporal", True, ranks) for dtype in ("float32", "bfloat16")]
            if ranks > 1:
                axes = ("height", "width") if number % 2 else ("width", "height")
                found.append(Case(layout, "float32", video, "temporal", False, ranks))
                found += [
                    Case(layout, "float32", video, "spatial", s, ranks, axis) for s, axis in zip((True, False), axes)
                ]
    return found


def run_cases(rank: int, size: int, todo: list[Case]) -> dict[Case, tuple[bool, float, str]]:
    groups = {n: dist.new_group(list(range(n))) for n in SIZES}
    made = cache(make_vae)

    def vae_of(case: Case) -> Any:
        return made(case.layout, getattr(torch, case.dtype))

    references = made_together((case.reference for case in todo), lambda case: encode(vae_of(case), case.pixels))
    done = {}
    for case in todo:
        if rank >= case.ranks:
            continue
        vae = vae_of(case)
        handle = parallelize_encode(
            vae, groups[case.ranks], mode=case.mode, strict=case.strict, axis=case.axis, deadline=30
        )
        out = encode(vae, case.pixels)
        assert handle.plan is not None
        mode = handle.plan.mode
        handle.remove()
        reference = references[case.reference]
        done[case] = (torch.equal(out, reference), (out.float() - reference.float()).abs().max().item(), mode)
    return done


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.sweep)],
    ids=["some", "every"],
)
def results(request: pytest.FixtureRequest) -> dict[Case, Result]:
    todo = cases(every=request.param)
    ranks = values(run_ranks(run_cases, max(SIZES), todo, seconds=240))
    merged = {}
    for case in todo:
        told = [done[case] for done in ranks if case in done]
        assert len(told) == case.ranks
        merged[case] = Result(all(t[0] for t in told), max(t[1] for t in told), told[0][2])
    return merged


def chosen(found: dict[Case, Result], mode: str, strict: bool) -> dict[Case, Result]:
    return {case: result for case, result in found.items() if case.mode == mode and case.strict == strict}


@pytest.mark.slow
def test_temporal_strict_equals_diffusers_bit_for_bit(results: dict[Case, Result]) -> None:
    for case, result in chosen(results, "temporal", True).items():
        assert result.equal, f"{case}: differs by {result.difference}"
        assert result.mode == ("single" if case.ranks == 1 else "temporal")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "strict"), [("temporal", False), ("spatial", True), ("spatial", False)])
def test_other_encodes_are_within_tolerance_of_diffusers(results: dict[Case, Result], mode: str, strict: bool) -> None:
    for case, result in chosen(results, mode, strict).items():
        assert result.difference <= 1e-5, f"{case}: differs by {result.difference}"
        assert result.mode == mode


def meet_at_cross_purposes(rank: int, size: int) -> tuple[list[str], bool]:
    """Another video on one rank; a decode on one rank; then all together."""
    vae, video = make_vae("2.1"), make_video(5, 32, 32)
    reference, texts = encode(vae, video), []
    handles = [parallelize_encode(vae, deadline=60), parallelize_decode(vae, deadline=60)]
    for call in (
        lambda: encode(vae, video + rank),
        lambda: encode(vae, video) if rank else vae.decode(make_latent(2, 4, 4)),
    ):
        try:
            call()
        except RankDisagreement as error:
            texts.append(str(error))
    equal = torch.equal(encode(vae, video), reference)
    for handle in handles:
        handle.remove()
    return texts, equal


def test_ranks_with_different_calls_raise_one_table_and_the_next_encode_works() -> None:
    for (other_video, other_call), equal in values(run_ranks(meet_at_cross_purposes, 2)):
        assert (
            "the 2 ranks of this encode came with different requests: rank 0: video float32 1x3x5x32x32" in other_video
        )
        assert "rank 0: call decode" in other_call
        assert "rank 1: call encode" in other_call
        assert equal


def lose_a_rank(rank: int, size: int) -> str:
    vae, video = make_vae("2.1"), make_video(9, 32, 32)
    parallelize_encode(vae, deadline=60, raise_failures=True)
    if rank:
        StrictOperators.normed_window = _fail  # type: ignore[assignment]
    try:
        encode(vae, video)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _fail(*_: object, **__: object) -> None:
    raise ValueError("a broken norm")


def test_error_on_one_rank_reaches_all_with_its_name() -> None:
    for text in values(run_ranks(lose_a_rank, 2)):
        assert text.startswith("RanksFailed: temporal encode on 2 ranks failed")
        assert "rank 1: failed: ValueError: a broken norm" in text
