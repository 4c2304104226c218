"""What the statuses of a group say about the inputs of its ranks."""

from __future__ import annotations

import pytest

from wanshim.core.sequence.watch import different_calls


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([[], []], []),
        ([[[1, "a"]], []], []),
        ([[[1, "a"], [2, "b"]], [[1, "a"]]], []),
        ([[[1, "a"], [2, "b"]], [[1, "a"], [2, "c"]]], ["b", "c"]),
        ([[[1, "a"]], [[1, "b"], [2, "b"]], []], ["a", "b", "not known"]),
    ],
    ids=["none", "one rank is ahead", "one call is known to one", "the second differs", "a third has not called"],
)
def test_first_call_with_different_inputs_is_found(calls: list[list[tuple[int, str]]], expected: list[str]) -> None:
    assert different_calls(calls) == expected
