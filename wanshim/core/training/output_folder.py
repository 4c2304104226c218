"""One output folder for all ranks of a job, whose scripts may each name one after the time or at random."""

from __future__ import annotations

from wanshim.core.ranks.rendezvous import Absent, Rendezvous
from wanshim.core.ranks.store import apart, default_store

WAIT_S = 1800.0  # for the slowest rank to load its model


def of_first_rank(folder: str) -> tuple[str, list[str]]:
    """The first rank's folder, and those that the ranks name, in rank order and each once.

    Every rank calls it.

    Raises:
        RankAbsent: a rank did not call it in time.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return folder, [folder]
    size = dist.get_world_size()
    try:
        named = Rendezvous(apart(default_store()), "wanshim/output", dist.get_rank(), size).meet(folder, WAIT_S).replies
    except Absent as reason:
        raise reason.error(range(size), "the training task", WAIT_S) from None
    return named[0], list(dict.fromkeys(named))
