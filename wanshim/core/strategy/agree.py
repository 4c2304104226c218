"""All ranks of a job run by one plan: what one rank does otherwise, the others wait for, or train without.

Each rank decides by itself, and the ranks compare what they must share. Where memory alone makes the difference, all
decide again for the least that any of them has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from wanshim.core.ranks.rendezvous import Absent, Rendezvous
from wanshim.core.ranks.store import apart, default_store
from wanshim.core.strategy.job import Limits
from wanshim.core.strategy.plan import TrainingPlan
from wanshim.errors import RankAbsent, RanksFailed

WAIT_S = 600.0  # for the slowest rank: it may still be reading the model
CALL = "the training task"  # in which all ranks come here

Decide = Callable[[Limits], TrainingPlan]


def agreed(decide: Decide, measure: Callable[[], Limits], wait_s: float = WAIT_S) -> TrainingPlan:
    """The plan of this rank, which all ranks of the default process group share, if there is one.

    Args:
        decide: this rank's plan for what the machine has.
        measure: what the machine has for this rank.
        wait_s: seconds to wait for the slowest rank.

    Raises:
        RanksFailed: another rank could not decide, with its error; or the ranks differ in more than memory, with each
            plan.
        RankAbsent: a rank did not come.
        Exception: what `decide` or `measure` raised on this rank, once the others know.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return decide(measure())
    limits, plan, replies = _compared(decide, measure, wait_s)
    if len({len(reply["available"]) for reply in replies}) == 1 and not _alike(replies):
        least = (min(counts) for counts in zip(*(reply["available"] for reply in replies), strict=True))
        host = min(reply["host"] for reply in replies)
        less = replace(limits, available=dict(zip(limits.available, least, strict=True)), host=host)
        _, plan, replies = _compared(decide, lambda: less, wait_s)
    if not _alike(replies):
        plans = "\n".join(f"  rank {rank}: {reply['plan']}" for rank, reply in enumerate(replies))
        raise RanksFailed(
            f"the ranks of this job have different plans:\n{plans}\n",
            expected="one plan for all",
            hint="GPUs must be of one kind",
            topic="same_environment",
        )
    return plan


def gathered(mine: dict[str, Any], wait_s: float = WAIT_S) -> list[dict[str, Any]]:
    """What every rank of the default process group brings, as JSON, in rank order; `mine` alone without a group.

    Raises:
        RankAbsent: a rank did not come.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    return _replies(mine, wait_s, "wanshim/facts")


def _alike(replies: list[dict[str, Any]]) -> bool:
    return all(reply["shared"] == replies[0]["shared"] for reply in replies)


def _compared(
    decide: Decide, measure: Callable[[], Limits], wait_s: float
) -> tuple[Limits, TrainingPlan, list[dict[str, Any]]]:
    """This rank's limits and plan, and what all ranks say of theirs."""
    try:
        limits = measure()
        plan = decide(limits)
    except Exception as error:
        with suppress(RankAbsent):
            _replies({"error": f"{type(error).__name__}: {error}"}, wait_s)
        raise
    # bytes by their order: each rank has devices of its own
    available = list(limits.available.values())
    mine = {"shared": plan.shared, "plan": str(plan), "available": available, "host": limits.host}
    replies = _replies(mine, wait_s)
    failed = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
    if failed:
        raise RanksFailed(f"no plan for this job: {'; '.join(failed)}", expected="a plan that every rank can run")
    return limits, plan, replies


def _replies(mine: Mapping[str, Any], wait_s: float, name: str = "wanshim/plan") -> list[dict[str, Any]]:
    """What all ranks say."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    try:
        return Rendezvous(apart(default_store()), name, rank, ranks).meet(dict(mine), wait_s).replies
    except Absent as reason:
        raise reason.error(range(ranks), CALL, wait_s) from None
