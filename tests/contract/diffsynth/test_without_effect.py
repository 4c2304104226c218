"""A training step that was called and did nothing is `ineffective`, with the reason, and strict fails on it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import runner

import wanshim
from tests.contract.diffsynth.training import Logger, Samples, Training
from tests.contract.diffsynth.video_job import REST, VIDEO, limit, module_with_video
from wanshim.adapters.diffsynth.splitting import micro_batch
from wanshim.errors import FeatureUnavailable

KEPT = "diffsynth.kept_attention"


class Idle(Training):
    """Its loss runs no block."""

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        return torch.stack([p.float().sum() for p in self.trainable_modules()]).sum()


class Elsewhere(Idle):
    """Its model is not the pipeline's `dit`."""

    def __init__(self) -> None:
        super().__init__()
        self.pipe.unet = self.pipe.dit
        del self.pipe.dit


class NoLora(Training):
    """Nothing is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.pipe.dit.requires_grad_(True)


def train(folder: Path, kind: type[Training], **changed: Any) -> None:
    module = kind()
    for name, value in vars(module_with_video().pipe).items():
        if name.endswith("_factor"):
            setattr(module.pipe, name, value)
    runner.launch_training_task(
        Accelerator(), Samples(1), module, Logger(folder), args=Namespace(**VIDEO | REST | changed)
    )


@pytest.mark.parametrize(
    ("feature", "variables", "kind", "reason"),
    [
        pytest.param(
            *("diffsynth.compiled_blocks", {"COMPILE": "1"}, Idle, "nothing was compiled: no block ran"),
            marks=pytest.mark.slow,
        ),
        (KEPT, {"KEEP": "attention"}, Idle, "no attention was kept: no checkpointed block ran"),
        (KEPT, {"KEEP": "attention"}, Elsewhere, "no attention was kept: no checkpointed block ran"),
        (KEPT, {"KEEP": "blocks"}, Idle, "no block was kept: none of them ran"),
        ("diffsynth.checkpoint_offload", {"OFFLOAD": "on"}, Idle, "no checkpoint was offloaded"),
        ("diffsynth.eight_bit_compute", {"COMPUTE": "int8"}, NoLora, "no frozen Linear of the blocks"),
        ("diffsynth.eight_bit_compute", {}, Training, "multiplies in eight bits: WANSHIM_COMPUTE is not set, or off"),
        ("diffsynth.compiled_blocks", {}, Training, "blocks are not compiled: WANSHIM_COMPILE is not set, or off"),
        ("diffsynth.resume", {}, Training, "no state is saved: WANSHIM_RESUME is not set, or off"),
    ],
    ids=["compile", "attention", "no dit", "blocks", "offload", "eight_bit", "no compute", "no compile", "no resume"],
)
def test_step_that_did_nothing_is_without_effect_and_strict_fails(
    feature: str,
    variables: dict[str, str],
    kind: type[Training],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    limit(monkeypatch, 1 << 30)
    wanshim.activate(f"none,{feature}")
    train(tmp_path, kind)
    row = wanshim.report().row(feature)
    assert (row.state, sum(row.fallbacks.values())) == ("ineffective", row.calls)
    assert reason in next(iter(row.fallbacks))
    with pytest.raises(FeatureUnavailable, match=f"{feature} was selected by .* left to the framework 1 time"):
        wanshim.report(strict=True)


def test_run_without_a_step_is_not_recorded(tmp_path: Path) -> None:
    wanshim.activate("none,diffsynth.progress")
    train(tmp_path, Idle, num_epochs=0)
    row = wanshim.report().row("diffsynth.progress")
    assert (row.state, row.fallbacks) == ("ineffective", {"not recorded: no step ran": 1})


def test_offload_by_the_option_of_diffsynth_that_is_refused_is_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate("none,diffsynth.checkpoint_offload")
    monkeypatch.setattr("wanshim.adapters.diffsynth.checkpoint_offload.refusal", lambda call: "DeepSpeed")
    train(tmp_path, Idle)
    row = wanshim.report().row("diffsynth.checkpoint_offload")
    assert (row.state, "DeepSpeed" in next(iter(row.fallbacks), "")) == ("ineffective", True)


def test_chunks_that_a_model_does_not_take_are_named_and_end_a_strict_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch, "is_chunkable", lambda dit: False)
    for name, value in {"CHUNK": "16", "PLAN": "stream"}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate("none,diffsynth.model_split")
    train(tmp_path, Training)
    assert "no chunks of tokens: the blocks of WanModel are not known in chunks" in "\n".join(
        wanshim.report().row("diffsynth.model_split").notes
    )
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.activate("none,diffsynth.model_split")
    with pytest.raises(FeatureUnavailable, match="WANSHIM_CHUNK is unavailable here: the blocks of WanModel"):
        train(tmp_path, Training)
