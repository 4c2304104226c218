"""One output folder for all ranks of a job, whose scripts may each name one after the time or at random."""

from __future__ import annotations

from wanshim.core.ranks.group import Group

WAIT_S = 1800.0  # for the slowest rank to load its model


def of_first_rank(folder: str) -> tuple[str, list[str]]:
    """The first rank's folder, and those that the ranks name, in rank order and each once.

    Every rank calls it.

    Raises:
        RankAbsent: a rank did not call it in time.
    """
    named = Group.of_job(own=True).gather("wanshim/output", folder, WAIT_S, "the training task")
    return named[0], list(dict.fromkeys(named))
