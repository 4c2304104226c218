"""Who holds what: every token and head once, in order, as even as can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanshim.core.sequence.plan import plan_sequence, shares, spans
from wanshim.errors import ModelInvalid


@given(total=st.integers(0, 10_000), parts=st.integers(1, 64))
def test_shares_differ_by_one_at_most_and_leave_nothing(total: int, parts: int) -> None:
    found = shares(total, parts)
    assert len(found) == parts
    assert sum(found) == total
    assert max(found) - min(found) <= 1
    assert list(found) == sorted(found, reverse=True)


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_spans_cover_every_place_once_and_in_order(counts: list[int]) -> None:
    places = [place for span in spans(tuple(counts)) for place in range(span.start, span.stop)]
    assert places == list(range(sum(counts)))


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (12, 8, (2, 2, 2, 2, 1, 1, 1, 1)),
        (24, 3, (8, 8, 8)),
        (40, 2, (20, 20)),
        (40, 3, (14, 13, 13)),
        (40, 4, (10,) * 4),
        (5, 5, (1,) * 5),
    ],
)
def test_heads_of_wan_over_ranks(heads: int, ranks: int, expected: tuple[int, ...]) -> None:
    assert plan_sequence(range(ranks), heads=heads, blocks=40).heads == expected


def test_plan_prints_who_holds_what() -> None:
    plan = plan_sequence((2, 3), heads=5, blocks=40).with_tokens(7)
    assert str(plan) == (
        "sequence parallel over 2 ranks, 40 blocks, 5 heads, 7 tokens\n"
        "  rank 2: heads 0 to 2 (3), tokens 0 to 3 (4)\n"
        "  rank 3: heads 3 to 4 (2), tokens 4 to 6 (3)"
    )
    assert "tokens" not in str(plan_sequence((0, 1), heads=2, blocks=1))


@pytest.mark.parametrize(
    ("ranks", "heads", "message"),
    [
        (
            (0,),
            12,
            r"a sequence group of rank 0\. Expected two or more different ranks\. Start one process for each GPU",
        ),
        ((1, 1), 12, r"a sequence group of ranks 1, 1\. Expected two or more different ranks"),
        (range(8), 5, r"8 ranks for 5 attention heads\. Expected at most as many ranks as heads.* groups of 5 ranks"),
    ],
)
def test_plan_that_cannot_be_is_one_clear_error(ranks: tuple[int, ...], heads: int, message: str) -> None:
    with pytest.raises(ModelInvalid, match=message):
        plan_sequence(ranks, heads=heads, blocks=1)
