"""README's line for DiffSynth-Studio, run as it stands: a LoRA trains on two processes, each sample on both."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.contract import readme
from tests.roads.roads import ROADS
from tests.roads.traveller import Traveller
from wanshim.patching.verdict import Verdict
from wanshim.testing.pytest_tests import verdict_here

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        verdict_here("diffsynth.model_split") is not Verdict.PATCH, reason="this release trains through other code"
    ),
]


def test_command_trains_each_sample_on_both_processes_and_writes_one_lora(tmp_path: Path) -> None:
    command = readme.commands()["DiffSynth-Studio"]
    (road,) = (road for road in ROADS if road.command == command)
    with closing(Traveller(tmp_path, on_cpu=True)) as traveller:
        found = traveller.run(road)
    assert len(list((found.folder / "out").glob("*.safetensors"))) == 1
