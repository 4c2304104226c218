"""What a job says of itself, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from wanshim.core.decoding import TileSettings
from wanshim.core.decoding.plan import VaeJob, build_plan, even_split, frame_work, sizes_text

JOB = VaeJob(latent=(1, 16, 6, 8, 10), itemsize=2, ranks=4, strict=False)
OUTPUT = SimpleNamespace(output_shape=lambda latent: (1, 3, 21, 64, 80))


@pytest.mark.parametrize(("active", "workers"), [(None, 4), (2, 2), (0, 1), (9, 4)])
def test_ranks_at_work_are_one_at_least_and_no_more_than_there_are(active: int | None, workers: int) -> None:
    job = replace(JOB, active=active)
    assert job.workers == workers
    split = job.split(8)
    assert split == even_split(8, workers) + ((8, 8),) * (4 - workers)
    assert sum(stop - start for start, stop in split) == 8


def test_operators_are_named_by_what_the_job_promises() -> None:
    assert JOB.passes == replace(JOB, strict_cuda=True).passes == "fast"
    assert replace(JOB, strict=True).passes == "strict"
    assert replace(JOB, strict=True, strict_cuda=True).passes == "strict_cuda"


@pytest.mark.parametrize(
    ("change", "chunks"),
    [
        ({}, (6, 3, 2, 1)),
        ({"latent": (1, 16, 9, 8, 10)}, (5, 3, 2, 1)),
        ({"latent": (1, 16, 2, 8, 10)}, (2, 1)),
        ({"chunk": 3}, (3,)),
        ({"chunk": 9}, (6,)),
        ({"chunk": 0}, (1,)),
        ({"strict": True, "chunk": 3}, (1,)),
    ],
)
def test_frames_of_a_step_are_what_was_asked_or_as_many_as_memory_allows(
    change: dict[str, object], chunks: tuple[int, ...]
) -> None:
    assert replace(JOB, **change).chunks() == chunks  # type: ignore[arg-type]


def test_tiles_are_those_of_the_vae() -> None:
    vae = SimpleNamespace(
        tile_sample_min_height=64, tile_sample_min_width=96, tile_sample_stride_height=48, tile_sample_stride_width=72.0
    )
    assert TileSettings.of(vae) == TileSettings(min_height=64, min_width=96, stride_height=48, stride_width=72)
    assert TileSettings() == TileSettings(min_height=256, min_width=256, stride_height=192, stride_width=192)


@pytest.mark.parametrize(("start", "stop", "work"), [(0, 0, 0.0), (0, 1, 0.32), (0, 6, 5.32), (1, 6, 5.0), (6, 6, 0.0)])
def test_first_frame_takes_a_third_of_the_work(start: int, stop: int, work: float) -> None:
    assert frame_work(start, stop) == pytest.approx(work)


def test_plan_adds_the_output_and_promises_bits_to_strict_operators_alone() -> None:
    def plan(job: VaeJob, exactness: str = "strict", axis: str | None = None) -> object:
        return build_plan(
            OUTPUT, job, mode="spatial", exactness=exactness, chunk=1, peak=(10, 20), cost=1.0, reason="", axis=axis
        )

    assert plan(JOB).peak == (10 + 3 * 21 * 64 * 80 * 2, 20 + 3 * 21 * 64 * 80 * 2)
    assert plan(replace(JOB, output_itemsize=0)).peak == (10, 20)
    assert plan(JOB).exactness == "within tolerance"
    assert plan(replace(JOB, strict=True)).exactness == "strict"
    assert plan(JOB, "approximate").exactness == "approximate"
    assert [plan(JOB, axis=axis).dim for axis in ("height", "width", None)] == [3, 4, None]


def test_plan_speaks_of_one_in_the_singular() -> None:
    one = build_plan(
        OUTPUT, replace(JOB, ranks=1), mode="single", exactness="approximate", chunk=2, peak=(0,), cost=1.0, reason="so"
    )
    assert str(one).startswith("single on 1 rank, approximate\n  split    none; 2 latent frames per step\n")
    assert "1 latent frame per step" in str(replace(one, chunk=1))
    assert str(replace(one, axis="width")).startswith("single by width on")
    assert sizes_text(((0, 6), (6, 11)), "rows") == "6 + 5 rows"
