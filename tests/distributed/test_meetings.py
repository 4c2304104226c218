"""Each meeting of ranks beside those of a decode and of a sharded step, where one rank is killed or stopped before it.

A rank that hosts the store of torch.distributed takes it along when it ends: every other rank says so at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.faults import outcome_of
from wanshim.core.ranks import agreement
from wanshim.core.ranks.group import Group
from wanshim.core.resume import ranks as resuming
from wanshim.core.shared.processes import process, process_state
from wanshim.core.strategy import Limits, Strategy, TrainingPlan, agree
from wanshim.core.streaming import shared_memory, shared_weights
from wanshim.core.streaming.shared_memory import allocate

ABSENT_S, PRESENT_S = 1.0, 60.0
PLAN = TrainingPlan(strategy=Strategy.RESIDENT, devices=("cpu",), step=None)
Meet = Callable[[float], Any]


def meetings(rank: int, size: int) -> dict[str, Meet]:
    """Each takes the seconds to wait for the other ranks."""
    ranks, here = resuming.Ranks(), Group.of_job()

    def within(module: Any, meet: Callable[[], Any], limit: str = "WAIT_S") -> Meet:
        def call(seconds: float) -> Any:
            setattr(module, limit, seconds)
            return meet()

        return call

    agreement.set_fingerprint_provider(lambda: {"wanshim": "0"})
    return {
        "patch set": lambda seconds: agreement.ensure(call="decode", timeout_s=seconds),
        "limits": within(agree, lambda: agree.least_of_all(Limits(host=7 - rank)).host),
        "plan": within(agree, lambda: agree.check_alike(PLAN)),
        "facts": within(agree, lambda: agree.gathered({"rank": rank}, "facts")),
        "output": within(agree, lambda: agree.output_folders(f"of rank {rank}"), "LOADED_S"),
        "resume": within(resuming, lambda: ranks.gather(rank)),
        "memory": within(shared_memory, lambda: allocate(64, here, "stream_model").leads),
        "weights": within(shared_weights, lambda: len(list(loaded_once(here).parameters()))),
    }


def loaded_once(here: Group) -> torch.nn.Module:
    def load_from(state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        model = torch.nn.Linear(2, 3)
        model.load_state_dict(dict(state), assign=True)
        return model

    return shared_weights.load_once(here, lambda: torch.nn.Linear(2, 3), load_from)[0]


def without_one(rank: int, size: int, victim: int, kind: str) -> Any:
    met, store = meetings(rank, size), dist.distributed_c10d._get_default_store().clone()
    if rank == victim:
        store.set("victim", process())
        os.kill(os.getpid(), getattr(signal, kind))
    name = "" if rank == victim else store.get("victim").decode()
    failed = {}
    if name:
        while process_state(name) == "runs":
            time.sleep(0.01)
        for call, meet in met.items():
            store.add(f"before {call}", 1)
            while store.add(f"before {call}", 0) < size - 1:  # else one that is late is absent, too
                time.sleep(0.01)
            failed[call] = outcome_of(lambda meet=meet: meet(ABSENT_S))
        if kind == "SIGSTOP" and store.add("failed", 1) == size - 1:
            os.kill(int(name.split("/")[-2]), signal.SIGCONT)
    return failed, {call: meet(PRESENT_S) for call, meet in met.items()} if kind == "SIGSTOP" else {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.sweep)])
def test_rank_that_is_not_there_is_named_in_time_and_a_stopped_one_that_goes_on_meets_the_others(
    size: int, kind: str
) -> None:
    victim = size - 1
    outcomes = run_ranks(without_one, size, victim, kind)
    gone = outcomes.pop() if kind == "SIGKILL" else None
    assert gone is None or gone.error == "Died"
    calls = {
        "patch set": "decode",
        **dict.fromkeys(("limits", "plan", "facts", "output", "resume"), "the training task"),
        "memory": "stream_model",
        "weights": "load_once",
    }
    for rank, (failed, met) in enumerate(values(outcomes)[:victim]):
        for name, call in calls.items():
            error, text, seconds = failed[name]
            assert (error, text.partition(" within")[0]) == ("RankAbsent", f"rank {victim} did not call {call}")
            assert seconds < 20 * ABSENT_S, name
        if kind == "SIGSTOP":
            ranks = list(range(size))
            assert met == {
                "patch set": None,
                "limits": 8 - size,
                "plan": None,
                "facts": [{"rank": number} for number in ranks],
                "output": [f"of rank {number}" for number in ranks],
                "resume": ranks,
                "memory": rank == 0,
                "weights": 2,
            }
    if kind == "SIGSTOP":
        assert values(outcomes)[victim][1]["resume"] == list(range(size))


def vote(rank: int, size: int, lazy: bool) -> tuple[str, str, float]:
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    ranks = resuming.Ranks()
    ranks.gather(None)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return outcome_of(lambda: [ranks.vote(0) for _ in range(2)])


@pytest.mark.parametrize("lazy", [False, True], ids=["connected", "connects at the first traffic"])
@pytest.mark.parametrize("size", [2, 3])
def test_vote_of_a_rank_that_was_killed_is_waited_for_no_longer(size: int, lazy: bool) -> None:
    outcomes = run_ranks(vote, size, lazy)
    assert outcomes[-1].error == "Died"
    for error, _, seconds in values(outcomes[:-1]):
        assert error in ("RuntimeError", "DistBackendError")
        assert seconds < 30
