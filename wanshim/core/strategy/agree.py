"""All ranks of a job run by one plan: what one rank does otherwise, the others wait for, or train without.

Each rank decides by itself, and the ranks compare what they must share. Where memory alone makes the difference, all
decide again for the least that any of them has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from wanshim.core.ranks.group import Group
from wanshim.core.strategy.job import Limits
from wanshim.core.strategy.plan import TrainingPlan
from wanshim.errors import RankAbsent, RanksFailed

WAIT_S = 600.0  # for the slowest rank: it may still be reading the model
CALL = "the training task"  # in which all ranks come here
_TOPIC = "wanshim/plan"

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
    group = Group.of_job(own=True)
    if group.size == 1:
        return decide(measure())
    limits, plan, replies = _compared(group, decide, measure, wait_s)
    if len({len(reply["available"]) for reply in replies}) == 1 and not _alike(replies):
        least = (min(counts) for counts in zip(*(reply["available"] for reply in replies), strict=True))
        host = min(reply["host"] for reply in replies)
        less = replace(limits, available=dict(zip(limits.available, least, strict=True)), host=host)
        _, plan, replies = _compared(group, decide, lambda: less, wait_s)
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
    return Group.of_job(own=True).gather("wanshim/facts", mine, wait_s, CALL)


def _alike(replies: list[dict[str, Any]]) -> bool:
    return all(reply["shared"] == replies[0]["shared"] for reply in replies)


def _compared(
    group: Group, decide: Decide, measure: Callable[[], Limits], wait_s: float
) -> tuple[Limits, TrainingPlan, list[dict[str, Any]]]:
    """This rank's limits and plan, and what all ranks say of theirs."""
    try:
        limits = measure()
        plan = decide(limits)
    except Exception as error:
        with suppress(RankAbsent):
            group.gather(_TOPIC, {"error": f"{type(error).__name__}: {error}"}, wait_s, CALL)
        raise
    # bytes by their order: each rank has devices of its own
    available = list(limits.available.values())
    mine = {"shared": plan.shared, "plan": str(plan), "available": available, "host": limits.host}
    replies = group.gather(_TOPIC, mine, wait_s, CALL)
    failed = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
    if failed:
        raise RanksFailed(f"no plan for this job: {'; '.join(failed)}", expected="a plan that every rank can run")
    return limits, plan, replies
