"""All ranks of a job run by one plan: what one rank does otherwise, the others wait for, or train without.

The ranks compare what they have, so that all decide for the least that any of them has, and then what they decided.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from wanshim.core.ranks.group import Group
from wanshim.core.strategy.job import Limits
from wanshim.core.strategy.plan import TrainingPlan
from wanshim.errors import RanksFailed

WAIT_S = 600.0  # for the slowest rank: it may still be reading the model
LOADED_S = 1800.0  # for the slowest rank to load its model
ENCODED_S = 12 * 3600.0  # for the rank with the longest videos to encode; who started the ranks ends them if one dies
CALL = "the training task"  # in which all ranks come here
TOPIC = "wanshim/plan"


def failing_together() -> AbstractContextManager[None]:
    """A context whose error, on the way to the plan, ends the other ranks, too."""
    return Group.of_job(own=True).failing_together(TOPIC, WAIT_S, CALL)


def output_folders(folder: str) -> list[str]:
    """The output folders that the ranks name, in rank order and each once."""
    return list(dict.fromkeys(gathered(folder, "wanshim/output", LOADED_S)))


def idle_on_all(idle: frozenset[str]) -> frozenset[str]:
    """The side models that no rank calls in a step."""
    return frozenset.intersection(*map(frozenset, gathered(sorted(idle), "wanshim/encoded", ENCODED_S)))


def kept_on_all(kept: bool) -> bool:
    """Whether every rank has what its samples are encoded to."""
    return all(gathered(kept, "wanshim/kept", ENCODED_S))


def least_of_all(limits: Limits) -> Limits:
    """The limits of this rank with the least that any rank has; its own where the ranks have not as many devices."""
    # bytes by their order: each rank has devices of its own
    found = gathered({"available": list(limits.available.values()), "host": limits.host}, TOPIC)
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
    found = gathered({"shared": plan.shared, "plan": str(plan)}, TOPIC)
    if any(reply["shared"] != found[0]["shared"] for reply in found):
        plans = "\n".join(f"  rank {rank}: {reply['plan']}" for rank, reply in enumerate(found))
        raise RanksFailed(
            f"the ranks of this job have different plans:\n{plans}\n",
            expected="one plan for all",
            hint="GPUs must be of one kind",
            topic="same_environment",
        )


def gathered(mine: Any, topic: str, seconds: float | None = None) -> list[Any]:
    """The JSON that every rank of the default process group brings to this topic, in rank order: see `Group.gather`."""
    return Group.of_job(own=True).gather(topic, mine, WAIT_S if seconds is None else seconds, CALL)
