"""README's line for DiffSynth-Studio, run as it stands: a LoRA trains on two processes, each sample on both."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.contract import readme
from tests.contract.diffsynth.prepared import Fork
from tests.kit.pytest_tests import verdict_here
from tests.roads.roads import ALONE, HERE, ROADS, Arrival, check, travel
from wanshim.demo import wan_checkpoint
from wanshim.patching.verdict import Verdict

pytestmark = [
    pytest.mark.slow,  # a launcher and two processes that import all of DiffSynth
    pytest.mark.sweep,  # `make slow` has the same road in tests/roads
    pytest.mark.road,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        verdict_here("diffsynth.model_split") is not Verdict.PATCH, reason="this release trains through other code"
    ),
]


def train_alone(folder: Path, arguments: str) -> None:
    """The script without wanshim, in a fork that has imported DiffSynth."""
    os.chdir(folder)
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"})
    sys.argv = ["train.py", *arguments.split()]
    runpy.run_path(str(HERE / "train.py"), run_name="__main__")


def test_command_trains_each_sample_on_both_processes_and_writes_one_lora(tmp_path: Path) -> None:
    command = readme.commands()["DiffSynth-Studio"]
    (road,) = (road for road in ROADS if road.command == command)
    assert road.reference == ALONE
    alone = tmp_path / "alone"
    alone.mkdir()
    wan_checkpoint.write(alone / "checkpoint")
    reference = Fork(train_alone, alone, road.arguments)
    found = travel(road.command, road.arguments, tmp_path / "ours", alone / "checkpoint", on_cpu=True)
    reference.join(300)
    assert reference.exitcode == 0
    check(road, found, Arrival(alone, "", frozenset()))
    assert len(list((found.folder / "out").glob("*.safetensors"))) == 1
