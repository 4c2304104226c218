"""All ranks of a job run by one plan: what one rank does otherwise, the others wait for, or train without.

The ranks compare what they have, so that all decide for the least that any of them has, and then what they decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from wanshim.core.ranks.group import Group
from wanshim.core.strategy.job import Limits
from wanshim.core.strategy.plan import TrainingPlan
from wanshim.errors import RankAbsent, RanksFailed

WAIT_S = 600.0  # for the slowest rank: it may still be reading the model
CALL = "the training task"  # in which all ranks come here
TOPIC = "wanshim/plan"


@contextmanager
def failing_together() -> Iterator[None]:
    """An error on this rank, on the way to the plan, ends the others too: they get it where they wait for this rank.

    Raises:
        RanksFailed: another rank had an error, or the ranks differ in more than memory, with each plan.
        RankAbsent: a rank did not come.
    """
    try:
        yield
    except (RanksFailed, RankAbsent):  # the others have it
        raise
    except Exception as error:
        with suppress(RankAbsent):
            gathered({"error": f"{type(error).__name__}: {error}"}, TOPIC)
        raise


def idle_on_all(idle: frozenset[str]) -> frozenset[str]:
    """The side models that no rank calls in a step."""
    return frozenset.intersection(*(frozenset(reply["idle"]) for reply in _compared({"idle": sorted(idle)})))


def least_of_all(limits: Limits) -> Limits:
    """The limits of this rank with the least that any rank has; its own where the ranks have not as many devices."""
    # bytes by their order: each rank has devices of its own
    found = _compared({"available": list(limits.available.values()), "host": limits.host})
    if len({len(reply["available"]) for reply in found}) > 1:
        return limits
    least = map(min, zip(*(reply["available"] for reply in found), strict=True))
    return replace(
        limits,
        available=dict(zip(limits.available, least, strict=True)),
        host=min(reply["host"] for reply in found),
    )


def check_alike(plan: TrainingPlan) -> None:
    """Compare what the ranks must do alike."""
    found = _compared({"shared": plan.shared, "plan": str(plan)})
    if any(reply["shared"] != found[0]["shared"] for reply in found):
        plans = "\n".join(f"  rank {rank}: {reply['plan']}" for rank, reply in enumerate(found))
        raise RanksFailed(
            f"the ranks of this job have different plans:\n{plans}\n",
            expected="one plan for all",
            hint="GPUs must be of one kind",
            topic="same_environment",
        )


def gathered(mine: dict[str, Any], topic: str) -> list[dict[str, Any]]:
    """The JSON that every rank of the default process group brings to this topic, in rank order; `mine` alone without
    a group.

    Raises:
        RankAbsent: a rank did not come.
    """
    return Group.of_job(own=True).gather(topic, mine, WAIT_S, CALL)


def _compared(mine: dict[str, Any]) -> list[dict[str, Any]]:
    found = gathered(mine, TOPIC)
    failed = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(found) if "error" in reply]
    if failed:
        raise RanksFailed(f"no plan for this job: {'; '.join(failed)}", expected="a plan that every rank can run")
    return found
