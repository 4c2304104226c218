"""Real kill -9 at random moments: whatever a run came to, it ends with the LoRA of the run that nobody disturbed.

python -m pytest tests/contract/diffsynth/test_resume_kills.py                  60 moments, each by its seed
python -m pytest tests/contract/diffsynth/test_resume_kills.py -m "not sweep"   two of them
"""

from __future__ import annotations

import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.diffsynth.resume_job import PLACES, seen
from tests.contract.diffsynth.resume_runs import said, start
from wanshim.core.resume.state import read_state

MOMENTS = 60
RESUME = {"WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"}
PLANS: tuple[tuple[int, dict[str, str], dict[str, Any]], ...] = (
    (1, {}, {"accumulation": 3, "workers": 2, "save_steps": 4}),
    (2, {}, {}),
    (1, {"WANSHIM_PLAN": "stream", "WANSHIM_KEEP": "attention"}, {"sizes": {"layers": 4}}),
    (1, {"WANSHIM_PLAN": "pipeline", "WANSHIM_DEVICES": "cpu,cpu"}, {"accumulation": 3}),
    (2, {"WANSHIM_PLAN": "sequence"}, {}),
    (1, {"WANSHIM_PLAN": "split", "WANSHIM_DEVICES": "cpu,cpu", "WANSHIM_COMPUTE": "int8"}, {}),
)


class Undisturbed:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of = cache(self._of)

    def _of(self, plan: int) -> tuple[Path, float]:
        """Its folder, and how many seconds it took."""
        processes, variables, job = PLANS[plan]
        began = time.monotonic()
        folder = self.folder / str(plan)
        assert not any(start(folder, processes, variables, **job)), said(folder)
        return folder, time.monotonic() - began


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def lora(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def states(folder: Path) -> list[Path]:
    return sorted(folder.glob("training_state/run-1/step-*"))


def seed(folder: Path, draw: random.Random) -> int:
    """What draws begin with: the run's own, or, where a state has them, any."""
    return draw.randrange(1000) if states(folder) else 5


def kill_once(folder: Path, undisturbed: Undisturbed, draw: random.Random, plan: int, place: str, attempt: int) -> str:
    """Start the run, or go on with it, and kill one of its processes or all; what was done."""
    processes, variables, job = PLANS[plan]
    ranks = draw.choice([[rank] for rank in range(processes)] + [list(range(processes))])
    common: dict[str, Any] = {**job, "seed": seed(folder, draw), "attempt": attempt}
    if place == "any":
        after = draw.uniform(0.0, undisturbed.of(plan)[1])
        start(folder, processes, {**variables, **RESUME}, (after, ranks), **common)
        return f"{processes} processes, {variables}: {ranks} after {after:.2f} s"
    only = 0 if place in ("write", "rename", "renamed") else ranks[0]  # rank 0 writes
    killed = (place, draw.randint(1, 5))
    start(folder, processes, {**variables, **RESUME}, killed=killed, only=only, **common)
    return f"{processes} processes, {variables}: rank {only} in {killed}"


def moment(number: int) -> Any:
    place = [*PLACES, "any", "any"][number % 8]
    return pytest.param(number, place, number % len(PLANS), marks=[pytest.mark.sweep] * (number not in FEW))


FEW = (3, 6)  # in the write of a state, at any time


@pytest.mark.slow
@pytest.mark.parametrize(("number", "place", "plan"), [moment(number) for number in range(MOMENTS)])
def test_killed_run_ends_with_the_lora_of_the_undisturbed_one(
    tmp_path: Path, undisturbed: Undisturbed, number: int, place: str, plan: int
) -> None:
    draw = random.Random(number)
    processes, variables, job = PLANS[plan]
    done = []
    for attempt in range(draw.randint(1, 2)):
        done.append(kill_once(tmp_path, undisturbed, draw, plan, place, attempt))
        for path in states(tmp_path):
            read_state(path)  # raises if it is not whole
    last, before = len(done), [int(path.name[5:13]) for path in states(tmp_path)]
    again = {**job, "seed": seed(tmp_path, draw), "attempt": last}
    ends = start(tmp_path, processes, {**variables, **RESUME}, **again)
    assert ends == [0] * processes, f"{done}\n{said(tmp_path, last)}"
    whole, _ = undisturbed.of(plan)
    since = int(states(tmp_path)[-1].name[5:13]) - max(before, default=0)
    for rank in range(processes):
        expected, resumed = seen(whole, rank, 0), seen(tmp_path, rank, last)
        assert resumed == expected[len(expected) - len(resumed) :], done
        assert len(resumed) <= since * job.get("accumulation", 1), done  # nothing is lost but the steps since the state
    expected_files, found = lora(whole), lora(tmp_path)
    assert expected_files.keys() == found.keys(), done
    for name, tensors in expected_files.items():
        assert tensors.keys() == found[name].keys()
        assert all(torch.equal(tensor, found[name][key]) for key, tensor in tensors.items()), (name, done)
