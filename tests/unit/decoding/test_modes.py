"""What each mode plans for a job: who computes what, what it needs and takes; and how frames leave a decoder."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanshim.core.decoding import TileSettings, VaePlan
from wanshim.core.decoding.memory import Extent, working_bytes
from wanshim.core.decoding.modes import MODES
from wanshim.core.decoding.modes.network import to_frames
from wanshim.core.decoding.modes.tile import Tile, assign, make_grid, needs_tiles
from wanshim.core.decoding.plan import VaeJob

from .graphs import tiny

JOB = VaeJob(latent=(1, 4, 7, 5, 9), itemsize=4, ranks=4, strict=False, active=3, output_itemsize=0)


def plans(mode: str, **change: Any) -> list[VaePlan]:
    return MODES[mode].plan(tiny("2.1"), replace(JOB, **change))


def needs(passes: str = "fast", *, keeps_history: bool, **extent: Any) -> int:
    whole = {"batch": 1, "frames": 7, "chunk": 7, "height": 5, "width": 9, "first": False}
    return working_bytes(tiny("2.1"), Extent(**{**whole, **extent}), 4, passes, keeps_history=keeps_history)


def test_temporal_peak_is_that_of_each_rank_s_run_and_nothing_where_there_is_none() -> None:
    (plan,) = plans("temporal")
    assert plan.split == ((0, 3), (3, 5), (5, 7), (7, 7))
    first = needs(keeps_history=False, frames=3, chunk=3, first=True)
    other = needs(keeps_history=False, frames=2, chunk=2)
    assert plan.peak == (first, other, other, 0)
    assert plan.chunk == 3
    (strict,) = plans("temporal", strict=True)
    first = needs("strict", keeps_history=False, frames=3, chunk=1, first=True)
    assert (strict.chunk, strict.peak[0], strict.peak[3]) == (1, first, 0)


def test_temporal_takes_as_long_as_the_rank_with_the_most_work() -> None:
    """The video's first latent frame is a third of the work of another: the second rank has more than the first."""
    (even,) = plans("temporal", latent=(1, 4, 6, 5, 9))
    assert even.cost == pytest.approx(2 * 1.01)
    (long_first,) = plans("temporal")
    assert long_first.cost == pytest.approx(2.32 * 1.01)


@pytest.mark.parametrize(
    ("axis", "split"), [("width", ((0, 3), (3, 6), (6, 9), (9, 9))), ("height", ((0, 2), (2, 4), (4, 5), (5, 5)))]
)
def test_spatial_peak_is_that_of_each_rank_s_band_with_its_halo(axis: str, split: Any) -> None:
    chunks = plans("spatial", axis=axis)
    assert [plan.chunk for plan in chunks] == [7, 4, 2, 1]
    for plan in chunks:
        assert plan.split == split
        halo = {"halo_rows": axis == "height", "halo_columns": axis == "width"}
        frames = {"frames": plan.chunk, "chunk": plan.chunk, "first": plan.chunk == 7}
        expected = [
            needs(keeps_history=plan.chunk < 7, **frames, **halo, **{axis: stop - start}) if stop > start else 0
            for start, stop in split
        ]
        assert list(plan.peak) == expected


@pytest.mark.parametrize(
    ("latent", "axis"), [((1, 4, 7, 5, 9), "width"), ((1, 4, 7, 9, 5), "height"), ((1, 4, 7, 5, 5), "width")]
)
def test_spatial_cuts_the_longer_axis(latent: Any, axis: str) -> None:
    assert {plan.axis for plan in plans("spatial", latent=latent)} == {axis}


def test_spatial_takes_as_long_as_the_widest_band_and_longer_in_small_chunks() -> None:
    costs = [plan.cost for plan in plans("spatial", axis="height")]
    work = 6.32 * 2 / 5
    assert costs == [pytest.approx(work * (1.04 + 0.04 / chunk)) for chunk in (7, 4, 2, 1)]


@pytest.mark.parametrize("mode", ["temporal", "spatial"])
def test_mode_that_shares_work_is_no_plan_for_one_rank(mode: str) -> None:
    assert plans(mode, active=1) == []
    assert plans(mode, active=2) != []


def test_single_peak_is_that_of_the_whole_picture_on_every_rank() -> None:
    (shared,) = plans("single")
    assert (shared.chunk, shared.exactness) == (1, "within tolerance")
    assert shared.peak == (needs(keeps_history=True, frames=1, chunk=1),) * 4
    alone = plans("single", ranks=1, active=None)
    assert [plan.chunk for plan in alone] == [7, 4, 2, 1]
    assert alone[0].peak == (needs(keeps_history=False, first=True),)
    assert [plan.cost for plan in alone] == [pytest.approx(6.32 * (1 + 0.02 / chunk)) for chunk in (7, 4, 2, 1)]


SETTINGS = TileSettings(min_height=32, min_width=32, stride_height=24, stride_width=24)  # 4 and 3 of the latent


def test_tile_peak_is_one_tile_at_work_and_the_values_of_all_own_tiles() -> None:
    plan = plans("tile", tiles=SETTINGS)[0]
    grid = make_grid(tiny("2.1"), SETTINGS, 5, 9)
    assert [tile.latent for tile in grid.tiles] == [
        (top, min(top + 4, 5), left, min(left + 4, 9)) for top in (0, 3) for left in (0, 3, 6)
    ]
    assert [tile.work for tile in grid.tiles] == [16, 16, 12, 8, 8, 6]
    assert plan.owners == (0, 1, 2, 2, 0, 1)
    at_once = needs(keeps_history=False, height=4, width=4, first=True)
    value = 3 * 25 * 4  # channels, frames, bytes
    assert plan.peak == (at_once + 24 * 64 * value, at_once + 22 * 64 * value, at_once + 20 * 64 * value, 0)
    assert plan.cost == pytest.approx(6.32 * 24 / 45 * 1.1)
    assert plan.split_text == "6 tiles, 2 + 2 + 2 + 0"


@pytest.mark.parametrize(
    ("height", "width", "tiled"), [(4, 4, False), (5, 4, True), (4, 5, True), (3, 9, True), (9, 3, True)]
)
def test_latent_of_one_tile_is_not_tiled(height: int, width: int, tiled: bool) -> None:
    assert needs_tiles(tiny("2.1"), SETTINGS, height, width) is tiled
    assert bool(plans("tile", tiles=SETTINGS, latent=(1, 4, 7, height, width))) is tiled


def test_height_and_width_of_tiles_are_not_confused() -> None:
    settings = TileSettings(min_height=32, min_width=48, stride_height=24, stride_width=32)
    grid = make_grid(tiny("2.1"), settings, 6, 9)
    assert (grid.columns, grid.blend_height, grid.blend_width) == (3, 8, 16)
    last = grid.tiles[-1]
    assert (last.row, last.column, last.latent, last.size) == (1, 2, (3, 6, 8, 9), (24, 8))
    assert last.crop == (24, 48, 64, 72)


def tile(index: int, work: int) -> Tile:
    return Tile(index=index, row=0, column=index, latent=(0, 1, 0, work), size=(8, 8 * work), crop=(0, 8, 0, 8))


def test_tiles_go_to_the_rank_with_the_least_work_the_largest_first() -> None:
    tiles = tuple(tile(index, work) for index, work in enumerate((1, 2, 5, 4, 3)))
    assert assign(tiles, 2) == (0, 0, 0, 1, 1)  # 5 + 2 + 1, 4 + 3
    assert assign(tiles, 5) == (4, 3, 0, 1, 2)
    assert assign(tiles[:2], 3) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uint8_frames_are_clamped_and_rounded_in_fp32(dtype: torch.dtype) -> None:
    """1 + 2 ** -7 steps of bf16 are as coarse as two values of a byte; a value beyond 1 would wrap around."""
    values = torch.tensor([-3.0, -1.0, -0.5039, 0.0, 0.2471, 0.4961, 0.7539, 1.0, 1.5]).to(dtype).view(1, 1, 1, 1, 9)
    expected = ((values.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    graph: Any = SimpleNamespace(clamped=False, patch_size=1)
    assert torch.equal(to_frames(graph, values.clone(), torch.uint8), expected)


def test_frames_are_clamped_where_the_framework_clamps() -> None:
    values = torch.tensor([-3.0, 0.25, 1.5]).view(1, 1, 1, 1, 3)
    for clamped, expected in ((True, [-1.0, 0.25, 1.0]), (False, [-3.0, 0.25, 1.5])):
        graph: Any = SimpleNamespace(clamped=clamped, patch_size=1)
        found = to_frames(graph, values.clone(), torch.float64)
        assert (found.dtype, found.flatten().tolist()) == (torch.float64, expected)
