"""A training run over a split that fails or is killed: that error, soon, and never half a file under its name."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import wanshim
from tests.contract.diffsynth import killed_worker, training
from tests.contract.diffsynth.prepared import Fork
from wanshim.core.model_split import split_of

FEATURE = "diffsynth.model_split"
WAIT_S = 120


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulation", "moment"),
    [
        (4, "write"),
        pytest.param(1, "write", marks=pytest.mark.sweep),
        pytest.param(4, "rename", marks=pytest.mark.sweep),
    ],
)
def test_killed_while_writing_leaves_only_whole_files_under_their_names(
    tmp_path: Path, accumulation: int, moment: str
) -> None:
    complete, _ = training.unsplit(accumulation)
    folder = tmp_path / "killed"
    job = Fork(killed_worker.main, folder, moment, accumulation)
    job.join(WAIT_S)
    assert job.exitcode == -signal.SIGKILL
    whole = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert len(whole) == 1
    assert whole.items() <= complete.items()
    (part,) = [path for path in folder.iterdir() if path.name not in whole]
    assert part.name.endswith(".partial")

    # The same job again, to the end: what is left over is in nobody's way.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANSHIM_DEVICES", "cpu,cpu")
        wanshim.activate(f"none,{FEATURE}")
        again, _, _ = training.train(folder, accumulation)
    assert again == complete
    assert all(load_file(folder / name) for name in complete)


def fail_in_stage_one(module: Any, in_backward: bool, error: Exception) -> None:
    """The last block raises at its third micro-batch: in the forward, or when its checkpoint runs it again."""
    calls: list[bool] = []

    def fail(*_: Any) -> None:
        if (torch._C._current_graph_task_id() != -1) is in_backward:
            calls.append(in_backward)
            if len(calls) == 3:
                raise error

    module.pipe.dit.blocks[-1].register_forward_pre_hook(fail)


@pytest.mark.slow
@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("accumulation", [4, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("bad block")], ids=repr)
def test_error_in_stage_one_ends_the_run_with_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_backward: bool, accumulation: int, error: Exception
) -> None:
    complete, _ = training.unsplit(accumulation)
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    made: list[training.Training] = []

    class Failing(training.Training):
        def __init__(self, fault: int | None = None) -> None:
            super().__init__(fault)
            fail_in_stage_one(self, in_backward, error)
            made.append(self)

    monkeypatch.setattr(training, "Training", Failing)
    with pytest.raises(type(error)) as caught:
        training.train(tmp_path / "split", accumulation)
    assert caught.value is error
    assert split_of(made[0].pipe.dit).plan.stages[1].last == len(made[0].pipe.dit.blocks)
    left = {path.name: path.read_bytes() for path in (tmp_path / "split").glob("*")}
    assert left.items() <= complete.items()
    assert "forward" not in vars(made[0])  # the loop's undo are taken off again
    # torch before 2.15 leaves a failed checkpoint's hooks in place for as long as somebody holds the traceback
    error.__traceback__ = None
    del caught
    gc.collect()
