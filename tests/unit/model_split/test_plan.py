"""Where blocks go, decided from byte counts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanshim.core.model_split.plan import plan_split
from wanshim.errors import PlacementInvalid

GIB = 2**30


@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=9),
    st.integers(0, 60),
    st.integers(2, 4),
)
def test_balanced_plan_has_the_least_possible_fullest_device(blocks: list[int], home: int, stages: int) -> None:
    if stages > len(blocks):
        stages = len(blocks)
    plan = plan_split(blocks, home, [f"cuda:{i}" for i in range(stages)])

    def fullest(points: tuple[int, ...]) -> int:
        bounds = [0, *points, len(blocks)]
        sizes = [sum(blocks[a:b]) for a, b in pairwise(bounds)]
        return max(home + sizes[0], *sizes[1:])

    best = min(fullest(points) for points in combinations(range(1, len(blocks)), stages - 1))
    assert fullest(plan.split_at) == best
    assert [stage.num_bytes for stage in plan.stages] == [
        sum(blocks[a:b]) for a, b in pairwise([0, *plan.split_at, len(blocks)])
    ]


def test_equal_blocks_are_halved() -> None:
    plan = plan_split([702_000_000] * 40, 460_000_000, ["cuda:0", "cuda:1"])
    assert plan.split_at == (20,)
    assert [plan.device_of(i) for i in (0, 19, 20, 39)] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_plan_prints_devices_blocks_and_sizes() -> None:
    plan = plan_split(
        [GIB] * 4, GIB // 2, ["cuda:0", "cuda:1"], split_at=[3], reason="split points of WANSHIM_SPLIT_AT"
    )
    lines = str(plan).splitlines()
    assert lines[0] == "split into 2 stages, split points of WANSHIM_SPLIT_AT"
    assert "  cuda:0: blocks 0 to 2, 3.00 GiB" in lines
    assert "  cuda:1: blocks 3 to 3, 1.00 GiB" in lines
    assert "  cuda:0: everything outside the blocks, 0.50 GiB" in lines


@pytest.mark.parametrize(
    ("devices", "split_at", "message"),
    [
        (
            ["cuda:0"],
            None,
            "1 device for a model split. Expected at least 2. Name at least two devices in WANSHIM_DEVICES.",
        ),
        (["cuda:0"] * 5, None, "5 devices for a model of 4 blocks. Expected at most 4 devices."),
        (["cuda:0", "cuda:1"], [1, 2], "2 split points [1, 2] for 2 devices. Expected 1 of them."),
        (
            ["cuda:0", "cuda:1"],
            [4],
            "split points [4] in a model of 4 blocks. Expected ascending block numbers from 1 to 3. "
            "Fix WANSHIM_SPLIT_AT, or unset it to balance the stages by bytes.",
        ),
        (
            ["cuda:0", "cuda:1", "cuda:2"],
            [2, 2],
            "split points [2, 2] in a model of 4 blocks. Expected ascending block numbers from 1 to 3. "
            "Fix WANSHIM_SPLIT_AT, or unset it to balance the stages by bytes.",
        ),
    ],
)
def test_plan_that_cannot_be_is_one_clear_error(devices: list[str], split_at: list[int] | None, message: str) -> None:
    with pytest.raises(PlacementInvalid) as caught:
        plan_split([1] * 4, 0, devices, split_at=split_at)
    assert str(caught.value) == message
