"""`decide` and `decide_again` over a recorded set of drawn jobs: each decision is the one that was recorded, in every
field and sentence."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.strategy.decisions import COUNT, RECORD, row

RECORDED = RECORD.read_text().splitlines()
PART = 100


@pytest.mark.parametrize("first", range(0, COUNT, PART))
def test_decision_on_each_drawn_job_is_the_recorded_one(first: int) -> None:
    numbers = range(first, first + PART)
    differing = [(RECORDED[number], made) for number in numbers if (made := row(number)) != RECORDED[number]]
    assert differing == []


def test_recorded_jobs_come_to_every_kind_of_decision() -> None:
    assert len(RECORDED) == COUNT
    counts = Counter(word for line in RECORDED for word in set(line.replace(",", "").split()))
    for word in ("resident", "stream", "pipeline", "split", "sequence", "refused", "chunk", "offload", "keep", "host",
                 "kept", "flight", "streamed", "moved"):  # fmt: skip
        assert counts[word] >= COUNT // 100, word
