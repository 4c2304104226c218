"""A forked child hangs on no lock that a thread of its parent held, and uses nothing that belongs to the parent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wanshim
from tests.forked_child import WAIT_S, in_forked_child
from tests.unit.conftest import FakeFramework
from tests.unit.fake_framework import REPAIR, Fake, a_seam
from wanshim import activation
from wanshim.core.decoding.ranks.exchange import Comm
from wanshim.core.model_split import split_model
from wanshim.core.offload import CheckpointOffload
from wanshim.core.pipeline import Pipeline
from wanshim.core.ranks import agreement
from wanshim.core.ranks.host import host_ranks
from wanshim.core.training.recorder import RunRecorder, TrainingRun


@pytest.fixture
def wan(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    yield Fake(fake, monkeypatch)
    wanshim.deactivate()


@pytest.mark.parametrize("busy_in", ["report", "import"])
def test_child_imports_and_reports_although_another_thread_held_the_lock(wan: Fake, busy_in: str) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def waits(*_: Any) -> Any:
        inside.set()
        assert go_on.wait(WAIT_S)
        return None if busy_in == "report" else lambda x: x

    seam = a_seam("vae:decode", waits) if busy_in == "import" else a_seam("vae:decode")
    slow = replace(REPAIR, name="fakewan.slow", seams=(seam,), blocked=waits if busy_in == "report" else None)
    wan.offer(REPAIR, slow)
    wanshim.activate()
    thread = threading.Thread(target=lambda: wanshim.report().rows if busy_in == "report" else wan.vae(), daemon=True)
    thread.start()
    assert inside.wait(WAIT_S)
    try:
        answer = in_forked_child(lambda: wan.dit().forward(1))
    finally:
        go_on.set()
        thread.join(WAIT_S)
    assert answer == "['ours', 'original', 1]"
    assert wanshim.report().row("fakewan.slow").state in ("registered", "applied")  # the parent's lock works on


def test_child_reports_its_own_calls_and_not_its_parents(wan: Fake) -> None:
    wan.offer(REPAIR)
    wanshim.activate()
    forward = wan.dit().forward
    forward(1)
    activation.CURRENT.runs[REPAIR.name].seams[0].notes.lead("goes on from step 3")

    def calls() -> object:
        before = wanshim.report().row(REPAIR.name).outcome
        forward(1)
        row = wanshim.report().row(REPAIR.name)
        return before, row.outcome, row.headline

    assert in_forked_child(calls) == "('not needed in this run', 'exercised, 1 call of forward', '')"
    assert wanshim.report().row(REPAIR.name).calls == 1


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


USES: dict[str, Callable[[], object]] = {
    "agreement": lambda: agreement.ensure(call="decode"),
    "decode": lambda: Comm("decode", None, 1.0, torch.device("cpu")),
    "ranks of the machine": lambda: host_ranks((0, 2)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.usefixtures("process_group")
def test_child_is_refused_the_process_group_of_its_parent(use: str) -> None:
    USES[use]()
    answer = in_forked_child(USES[use])
    assert answer.startswith("WanshimError: process ")
    assert "its process group is that rank's" in answer
    USES[use]()  # the parent's still works


@pytest.mark.usefixtures("process_group")
def test_child_may_use_a_process_group_of_its_own(tmp_path: Path) -> None:
    def own() -> object:
        dist.distributed_c10d._update_default_pg(None)  # destroying the parent's would speak to its peers
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/own", rank=0, world_size=1, group_name="own")
        return agreement.ensure(call="decode")

    assert in_forked_child(own) == "None"


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_child_is_refused_the_pipeline_the_offload_and_the_decoder_of_its_parent() -> None:
    handle = split_model(Blocks(), ["cpu", "cpu"])
    pipeline, offload, comm = (
        Pipeline(handle),
        CheckpointOffload(min_bytes=0),
        Comm("decode", None, 1.0, torch.device("cpu")),
    )

    def saves() -> None:
        with offload.saving():
            torch.ones(4, requires_grad=True).pow(2)

    def decodes() -> None:
        with comm.alone():
            pass

    for use in (pipeline.join, saves, decodes):
        use()
        assert in_forked_child(use).startswith("WanshimError: ")
    pipeline.remove()


def test_child_writes_nothing_to_the_log_of_its_parent(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, TrainingRun("run", "none 1", str(tmp_path / "out"), None), 0, ["cpu"])

    def records() -> None:
        recorder.end_step(0.5, steps_optimizer=True)
        recorder.close("failed", "in the child")

    assert in_forked_child(records) == "None"
    text = (recorder.folder / "run.json").read_text()
    recorder.close()
    assert '"running"' in text
    assert '"finished"' in (recorder.folder / "run.json").read_text()
