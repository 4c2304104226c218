"""Ranks that would run by different plans run by one, or all end with both plans."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from tests.distributed.decoding.ranks import run_ranks, values
from wanshim.core.strategy import KeptOn, Limits, Strategy, TrainingPlan, check_alike, failing_together, least_of_all
from wanshim.core.strategy.candidates import StepSettings
from wanshim.errors import PlacementInvalid, RanksFailed


def plan(rank: int, device: str, available: int, changes: dict[str, str]) -> TrainingPlan:
    """As many blocks kept as there are bytes, attention where there are five."""
    keep = KeptOn.DEVICE if available >= 5 else None
    step = StepSettings(chunk=None, offload=False, in_flight=1, keep=keep, num_kept_blocks=(available,))
    return TrainingPlan(
        strategy=Strategy.SEQUENCE, devices=(device,), step=step, ranks=2, side_models={"vae": device},
        block_changes=changes, notes=(f"of rank {rank}",),
    )  # fmt: skip


def agreed(decide: Callable[[Limits], TrainingPlan], measure: Callable[[], Limits]) -> TrainingPlan:
    """The plan of this rank, as a training call comes to it."""
    with failing_together():
        found = decide(least_of_all(measure()))
        check_alike(found)
    return found


def case(rank: int, available: int, changes: dict[str, str], decided: list[int]) -> TrainingPlan:
    device = f"cuda:{rank}"

    def decide(limits: Limits) -> TrainingPlan:
        decided.append(limits.available[device])
        return plan(rank, device, limits.available[device], changes)

    return agreed(decide, lambda: Limits(available={device: available}))


def alike(rank: int) -> list[object]:
    decided: list[int] = []
    found = case(rank, 7, {}, decided)
    assert found.notes == (f"of rank {rank}",)
    return [decided, found.shared]


def less_on_one(rank: int) -> list[object]:
    decided: list[int] = []
    found = case(rank, 7 - 3 * rank, {}, decided)
    return [decided, found.shared["step"]]


def less_host_memory_on_one(rank: int) -> list[object]:
    """As many blocks kept as there are bytes in host memory."""
    found = agreed(
        lambda limits: plan(rank, f"cuda:{rank}", limits.host, {}),
        lambda: Limits(available={f"cuda:{rank}": 9}, host=7 - 3 * rank),
    )
    return [found.shared["step"]]


def other_changes(rank: int) -> str:
    try:
        case(rank, 7, {"compiled": "blocks are compiled"} if rank else {}, [])
    except RanksFailed as error:
        return str(error)
    return "agreed"


def one_fails(rank: int) -> str:
    def measure() -> Limits:
        if rank:
            raise PlacementInvalid("no step fits here")
        return Limits(available={"cuda:0": 7})

    try:
        agreed(lambda limits: plan(0, "cuda:0", 7, {}), measure)
    except (RanksFailed, PlacementInvalid) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


def one_cannot_decide(rank: int) -> str:
    def decide(limits: Limits) -> TrainingPlan:
        if rank == 0:
            raise PlacementInvalid("no plan here")
        return plan(rank, "cuda:0", 7, {})

    try:
        agreed(decide, Limits)
    except (RanksFailed, PlacementInvalid) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


def one_leaves_it_to_the_framework(rank: int) -> str:
    own = TrainingPlan(strategy=Strategy.RESIDENT, devices=("cuda:0",), step=None)
    limits = Limits(available={"cuda:0": 7}) if rank else Limits()
    try:
        agreed(lambda limits: plan(0, "cuda:0", 7, {}) if rank else own, lambda: limits)
    except RanksFailed as error:
        return str(error)
    return "agreed"


CASES: tuple[Callable[[int], object], ...] = (
    alike, less_on_one, less_host_memory_on_one, other_changes, one_fails, one_cannot_decide,
    one_leaves_it_to_the_framework,
)  # fmt: skip


def all_cases(rank: int, size: int) -> dict[str, object]:
    found = {each.__name__: each(rank) for each in CASES}
    dist.barrier()  # a rank's connections end with it
    return found


def test_ranks_run_by_one_plan_or_none() -> None:
    first, second = values(run_ranks(all_cases, 2))
    assert first["alike"] == second["alike"]
    assert first["alike"][0] == [7]  # nobody decided twice
    step = first["less_on_one"][1]
    assert step == second["less_on_one"][1]
    assert (step["num_kept_blocks"], step["keep"]) == ([4], None)
    assert (first["less_on_one"][0], second["less_on_one"][0]) == ([4], [4])
    assert first["less_host_memory_on_one"][0]["num_kept_blocks"] == [4]
    assert first["less_host_memory_on_one"] == second["less_host_memory_on_one"]
    assert first["other_changes"] == second["other_changes"]
    assert "rank 0: sequence on cuda:0" in first["other_changes"]
    assert "blocks are compiled" in first["other_changes"]
    assert first["one_fails"].startswith(
        "RanksFailed: the training task failed on rank 1: PlacementInvalid: no step fits"
    )
    assert second["one_fails"].startswith("PlacementInvalid: no step fits here")
    assert first["one_cannot_decide"].startswith("PlacementInvalid: no plan here")
    assert second["one_cannot_decide"].startswith(
        "RanksFailed: the training task failed on rank 0: PlacementInvalid: no plan here"
    )
    assert first["one_leaves_it_to_the_framework"] == second["one_leaves_it_to_the_framework"]
    assert "rank 0: resident on cuda:0" in second["one_leaves_it_to_the_framework"]
