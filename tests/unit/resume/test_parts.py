"""A state's part for each process of a run under another plan than the one that saved it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from wanshim.adapters.diffsynth.resuming.run import ResumableRun


def part(rank: int, size: int, groups: int, parts: int) -> int:
    """The number of the part that a rank gets, of `size` ranks in `groups` that see one sample each."""
    run: Any = SimpleNamespace(
        ranks=SimpleNamespace(rank=rank, size=size),
        call=SimpleNamespace(accelerator=SimpleNamespace(num_processes=groups)),
    )
    return int(ResumableRun._part_of(run, {"ranks": [{"draws": number} for number in range(parts)]})["draws"])


@pytest.mark.parametrize(
    ("size", "groups", "parts", "expected"),
    [
        (4, 2, 4, [0, 1, 2, 3]),  # as they were
        (4, 2, 2, [0, 0, 1, 1]),  # saved by one process a group
        (4, 2, 8, [0, 0, 4, 4]),  # by four: the first one's
        (2, 2, 4, [0, 2]),
        (3, 1, 1, [0, 0, 0]),
    ],
)
def test_each_rank_gets_the_part_of_its_group(size: int, groups: int, parts: int, expected: list[int]) -> None:
    assert [part(rank, size, groups, parts) for rank in range(size)] == expected
