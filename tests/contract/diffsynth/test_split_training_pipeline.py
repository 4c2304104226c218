"""DiffSynth's `launch_training_task` with pipelined micro-batches: the same files, the same logs, nothing left."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import wanshim
from tests.contract.diffsynth import training
from tests.contract.diffsynth.training import FEATURE, train, unsplit
from wanshim.adapters.diffsynth.splitting import pipelined_loop as training_loop
from wanshim.core.model_split import split_of


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "accumulation"), [(2, 4), pytest.param(3, 3, marks=pytest.mark.sweep)])
def test_pipelined_training_writes_the_files_and_logs_of_unsplit_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int, accumulation: int
) -> None:
    """Checkpoints every second micro-batch, some of them in the middle of an accumulation; last group partial."""
    expected, logs = unsplit(accumulation)
    monkeypatch.setenv("WANSHIM_DEVICES", ",".join(["cpu"] * stages))
    wanshim.activate(f"none,{FEATURE}")
    found, split_logs, module = train(tmp_path / "split", accumulation)
    assert len(expected) == 7
    assert found == expected
    assert split_logs == logs
    notes = wanshim.report(strict=False).row(FEATURE).notes
    assert any(f"{accumulation} micro-batches in a pipeline of {stages} stages" in note for note in notes)
    assert not any("one micro-batch at a time" in note for note in notes)
    hooks = [h for m in module.pipe.dit.modules() for h in (*m._forward_pre_hooks, *m._forward_hooks)]
    split_of(module.pipe.dit).remove()
    assert len(hooks) == len(module.pipe.dit.blocks) + 1 + stages  # the split's own alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulation", "variables", "reason"),
    [
        (1, {}, "gradient accumulation is 1"),
        pytest.param(2, {"WANSHIM_PIPELINE": "0"}, "WANSHIM_PIPELINE is off", marks=pytest.mark.sweep),
    ],
)
def test_plan_says_plainly_when_a_split_is_room_and_not_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int, variables: dict[str, str], reason: str
) -> None:
    expected, logs = unsplit(accumulation)
    for name, value in {"WANSHIM_DEVICES": "cpu,cpu", **variables}.items():
        monkeypatch.setenv(name, value)
    wanshim.activate(f"none,{FEATURE}")
    found, split_logs, _ = train(tmp_path / "split", accumulation)
    assert (found, split_logs) == (expected, logs)
    notes = wanshim.report().row(FEATURE).notes
    assert any(reason in note and "room, not speed" in note for note in notes)


class ClippingAccelerator(Accelerator):
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        clip(self)


@functools.wraps(Accelerator.backward)
def clipping_backward(
    self: Accelerator, loss: torch.Tensor, original: Any = Accelerator.backward, **kwargs: Any
) -> None:
    original(self, loss, **kwargs)
    clip(self)


def clip(accelerator: Accelerator) -> None:
    if accelerator.sync_gradients:
        torch.nn.utils.clip_grad_norm_([p for model in accelerator._models for p in model.parameters()], 1e-3)


@pytest.mark.parametrize("by", ["a subclass", pytest.param("the class", marks=pytest.mark.slow)])
def test_accelerator_with_a_backward_of_its_own_sees_whole_gradients(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program clips gradients that leaves DiffSynth's loop as it is: one micro-batch at a time."""
    unclipped, _ = unsplit(2)
    if by == "a subclass":
        monkeypatch.setattr(training, "Accelerator", ClippingAccelerator)
    else:
        monkeypatch.setattr(Accelerator, "backward", clipping_backward)
    expected, logs, _ = train(tmp_path / "alone", 2)
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    found, split_logs, _ = train(tmp_path / "split", 2)
    assert (found, split_logs) == (expected, logs)
    assert found != unclipped
    notes = wanshim.report().row(FEATURE).notes
    assert any("its accelerator has a backward of the program's own" in note for note in notes)


@pytest.mark.parametrize("fault", [0, 5])
def test_out_of_memory_in_a_lane_ends_the_run_with_that_error_and_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    complete, _ = unsplit(4)
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(torch.OutOfMemoryError, match="no room for this one"):
        train(tmp_path / "split", 4, fault)
    left = {path.name: path.read_bytes() for path in (tmp_path / "split").glob("*")}
    assert left.items() <= complete.items()


def test_file_that_could_not_be_written_whole_is_not_there_and_the_old_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "lora.safetensors"
    target.write_bytes(b"old")

    def half(obj: Any, f: str, **kwargs: Any) -> None:
        Path(f).write_bytes(b"ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        training_loop.save_whole(half)({}, str(target))
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["lora.safetensors"]


def test_two_jobs_that_save_under_one_name_never_write_into_one_file(tmp_path: Path) -> None:
    target = tmp_path / "epoch-0.safetensors"
    seen = []

    def other_job(obj: Any, f: str, **kwargs: Any) -> None:
        Path(f).write_bytes(b"other" * 100)

    def this_job(obj: Any, f: str, **kwargs: Any) -> None:
        with Path(f).open("wb") as file:
            file.write(b"this")
            file.flush()
            training_loop.save_whole(other_job)({}, str(target))
            seen.append(target.read_bytes())
            file.write(b"this")

    training_loop.save_whole(this_job)({}, str(target))
    assert seen == [b"other" * 100]
    assert target.read_bytes() == b"thisthis"
    assert list(tmp_path.iterdir()) == [target]


def test_save_follows_no_link_that_lies_in_wait(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "output"
    victim.write_bytes(b"keep")
    folder.mkdir()
    (folder / "lora.safetensors.partial").symlink_to(victim)
    training_loop.save_whole(lambda obj, f: Path(f).write_bytes(b"new"))({}, str(folder / "lora.safetensors"))
    assert victim.read_bytes() == b"keep"
    assert (folder / "lora.safetensors").read_bytes() == b"new"


def test_save_without_its_folder_fails_as_without_the_shim(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "lora.safetensors"
    with pytest.raises(FileNotFoundError, match=r"none/lora\.safetensors'$"):
        training_loop.save_whole(lambda obj, f: Path(f).write_bytes(b"new"))({}, str(missing))
    assert training_loop.save_whole(lambda obj, f: None)({}, str(missing)) is None  # a rank that does not write
