"""Checkpoint offload under `launch_training_task`: the files of no offload, and torch's names back afterwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from accelerate import Accelerator
from diffsynth.diffusion import runner

import wanshim
from tests.contract.diffsynth import variants, video_job
from tests.contract.diffsynth.training import Logger, Samples, Training
from tests.contract.diffsynth.variant_steps import step
from wanshim.adapters.diffsynth import checkpoint_offload
from wanshim.adapters.diffsynth.checkpoint_offload import offload_checkpoints
from wanshim.adapters.diffsynth.training_road import Row, TrainingCall
from wanshim.core.strategy import predict
from wanshim.errors import FeatureUnavailable, PlacementInvalid
from wanshim.undo import Undo

FEATURE = "diffsynth.checkpoint_offload"
SPLIT = "diffsynth.model_split"
ORIGINALS = (torch.autograd.graph.save_on_cpu, torch.utils.checkpoint.checkpoint)


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_offload, "MIN_BYTES", 1)  # not the empty tensor that torch 2.11 saves with each


def train(folder: Path, accumulation: int = 1, option: bool = False) -> dict[str, bytes]:
    torch.manual_seed(11)
    module = Training()
    module.use_gradient_checkpointing_offload = option
    runner.launch_training_task(
        Accelerator(gradient_accumulation_steps=accumulation), Samples(4), module, Logger(folder),
        learning_rate=1e-2, num_workers=0, save_steps=2,
    )  # fmt: skip
    assert (torch.autograd.graph.save_on_cpu, torch.utils.checkpoint.checkpoint) == ORIGINALS
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


def notes(feature: str, strict: bool = True) -> str:
    return "\n".join(wanshim.report(strict=strict).row(feature).notes)


@pytest.mark.slow
def test_option_of_diffsynth_goes_through_wanshim_and_writes_the_same_files(tmp_path: Path) -> None:
    expected = train(tmp_path / "plain")
    assert train(tmp_path / "theirs", option=True) == expected
    wanshim.activate(f"none,{FEATURE}")
    assert train(tmp_path / "ours", option=True) == expected
    # 4 micro-batches: the input of each of 4 blocks, and what they share once
    assert "28 checkpoint inputs" in notes(FEATURE)


def test_setting_offloads_without_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(tmp_path / "plain")
    monkeypatch.setenv("WANSHIM_OFFLOAD", "on")  # switches the feature on too
    wanshim.activate()
    assert train(tmp_path / "ours") == expected
    assert "28 checkpoint inputs" in notes(FEATURE, strict=False)  # S2V's repair is on, and there is no S2V


def test_feature_that_had_nothing_to_offload_says_so(tmp_path: Path) -> None:
    wanshim.activate(f"none,{FEATURE}")
    train(tmp_path)
    assert "no checkpoint was offloaded: pass --use_gradient_checkpointing_offload or set" in notes(
        FEATURE, strict=False
    )
    assert wanshim.report().row(FEATURE).state == "ineffective"


def test_checkpoints_that_are_all_small_are_named_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_offload, "MIN_BYTES", 2**20)
    wanshim.activate(f"none,{FEATURE}")
    train(tmp_path, option=True)
    assert "no checkpoint was offloaded: none kept a tensor of 1.00 MiB or more" in notes(FEATURE, strict=False)
    assert "pass --use_gradient_checkpointing_offload" not in notes(FEATURE, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "variables"), [(True, {}), (False, {"WANSHIM_OFFLOAD": "on"})])
def test_split_that_is_asked_to_offload_does_so_in_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: bool, variables: dict[str, str]
) -> None:
    expected = train(tmp_path / "plain", accumulation=2)
    for name, value in {"WANSHIM_DEVICES": "cpu,cpu", **variables}.items():
        monkeypatch.setenv(name, value)
    wanshim.activate(f"none,{SPLIT},{FEATURE}")
    assert train(tmp_path / "ours", accumulation=2, option=option) == expected
    assert "2 micro-batches in a pipeline of 2 stages" in notes(SPLIT)
    asked = "--use_gradient_checkpointing_offload" if option else "WANSHIM_OFFLOAD"
    assert f"checkpoints are offloaded to host memory, bit for bit the same: {asked}" in notes(FEATURE)
    assert "28 checkpoint inputs" in notes(FEATURE)


def test_offload_switched_off_leaves_diffsynth_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Samples, "__getitem__", _noting(seen, Samples.__getitem__))
    monkeypatch.setenv("WANSHIM_OFFLOAD", "off")
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{SPLIT},{FEATURE}")
    train(tmp_path, option=True)
    assert seen == [ORIGINALS[0]] * 4
    assert "WANSHIM_OFFLOAD is off" in notes(FEATURE, strict=False)
    assert "offloaded" not in notes(SPLIT, strict=False)


def _noting(seen: list[Any], original: Any) -> Any:
    def item(self: Any, index: int) -> Any:
        seen.append(torch.autograd.graph.save_on_cpu)
        return original(self, index)

    return item


@pytest.mark.slow
def test_split_offloads_by_itself_where_it_would_not_fit_and_cuts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "OFFLOADED_WINDOW", 1)
    expected, _ = video_job.train(tmp_path / "plain")
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{SPLIT}")
    whole = video_job.predicted_bytes(tmp_path, monkeypatch, None)
    video_job.limit(monkeypatch, whole - 1)
    found, _ = video_job.train(tmp_path / "offloaded")
    assert found == expected
    assert "checkpoints are offloaded to host memory, bit for bit the same: the step would not fit" in notes(SPLIT)
    assert "in chunks" not in notes(SPLIT)


def test_refusal_names_offload_where_it_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "OFFLOADED_WINDOW", 1)
    for name, value in {"DEVICES": "cpu,cpu", "OFFLOAD": "off", "CHUNK": "off"}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{SPLIT}")
    whole = video_job.predicted_bytes(tmp_path, monkeypatch, None)
    video_job.limit(monkeypatch, whole - 1)
    with pytest.raises(Exception, match="checkpoint offload: WANSHIM_OFFLOAD=on"):
        video_job.train(tmp_path / "refused")


def test_refusal_proposes_no_base_where_the_base_is_in_eight_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"DEVICES": "cpu,cpu", "CHUNK": "off", "BASE": "int8"}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{SPLIT}")
    video_job.limit(monkeypatch, 2**18)
    with pytest.raises(PlacementInvalid, match="this training step does not fit") as caught:
        video_job.train(tmp_path / "refused")
    assert "WANSHIM_BASE" not in str(caught.value)
    assert "fp8" not in str(caught.value)


def call_of(state: object, model: object) -> TrainingCall:
    accelerator = SimpleNamespace(state=state)
    return TrainingCall(accelerator=accelerator, model=model, logger=None, dataset=None, options={}, script=None)


def test_deepspeed_is_refused_with_its_own_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DeepSpeed itself needs a GPU; its mark on accelerate's state is what the refusal reads."""
    state = SimpleNamespace(deepspeed_plugin=object())
    assert "cpu_checkpointing" in str(checkpoint_offload.refusal(call_of(state, None)))
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    monkeypatch.setenv("WANSHIM_OFFLOAD", "on")
    monkeypatch.setattr(checkpoint_offload, "refusal", lambda call: "DeepSpeed")
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(FeatureUnavailable, match="is unavailable here: DeepSpeed"):
        train(tmp_path)


@pytest.mark.parametrize("name", variants.MAKERS)
def test_variant_gives_the_same_loss_and_gradients_offloaded(name: str) -> None:
    wanshim.activate("none,diffsynth.s2v_checkpointing")
    expected = step(variants.tiny(name, "cpu"), use_gradient_checkpointing=True)
    said: list[str] = []
    with Undo() as undo:
        offload_checkpoints(undo, Row.of(said.append), every=True)
        found = step(variants.tiny(name, "cpu"), use_gradient_checkpointing=True)
    assert all(map(torch.equal, expected, found))
    assert "checkpoint inputs" in said[0]
