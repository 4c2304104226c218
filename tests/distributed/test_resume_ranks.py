"""What the ranks of a resumable run say to each other."""

from __future__ import annotations

from typing import Any

from tests.distributed.decoding.ranks import run_ranks, values


def vote(rank: int, size: int) -> tuple[list[int], list[str], int]:
    from wanshim.core.resume.ranks import Ranks

    ranks, said = Ranks(), []
    decided = [ranks.vote(rank + 1), ranks.vote(0)]
    work: Any = ranks._work

    class Noted:
        def wait(self) -> None:
            said.append("the vote has ended")
            work.wait()

    ranks._work = Noted()
    ranks.gather(None)
    return decided, said, ranks.delay


def test_no_vote_is_on_its_way_behind_a_gathering() -> None:
    """A process that ends under one may be aborted: gloo's thread then frees a tensor after the interpreter."""
    assert values(run_ranks(vote, 2)) == 2 * [([0, 2], ["the vote has ended"], 1)]


def test_vote_of_a_process_alone_counts_at_once() -> None:
    from wanshim.core.resume.ranks import Ranks

    ranks = Ranks()
    assert [ranks.vote(2), ranks.delay, ranks.gather("own")] == [2, 0, ["own"]]
