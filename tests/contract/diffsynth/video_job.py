"""A training job whose arguments say how large its videos are, and its predicted memory."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import wanshim
from tests.contract.diffsynth.training import Logger, Samples, Training
from wanshim import hand_over
from wanshim.adapters.diffsynth.splitting import launch
from wanshim.core.strategy import TrainingPlan

VIDEO = {"height": 64, "width": 64, "num_frames": 9, "use_gradient_checkpointing": True}  # 48 tokens


REST = {
    "learning_rate": 1e-2, "weight_decay": 0.01, "dataset_num_workers": 0, "save_steps": None, "num_epochs": 1,
    "enable_model_cpu_offload": False, "enable_optimizer_cpu_offload": False, "cpu_offload_split_threshold": None,
    "customized_optimizer": None,
}  # fmt: skip


def module_with_video(**made: Any) -> Training:
    """What a pipeline says of its latents."""
    module = Training(**made)
    for name, value in (
        ("height_division_factor", 16), ("width_division_factor", 16), ("time_division_factor", 4),
    ):  # fmt: skip
        setattr(module.pipe, name, value)
    return module


def train(folder: Path, accumulation: int = 1, **changed: Any) -> tuple[dict[str, bytes], Training]:
    from diffsynth.diffusion import runner

    torch.manual_seed(11)
    module = module_with_video()
    runner.launch_training_task(
        Accelerator(gradient_accumulation_steps=accumulation),
        Samples(3),
        module,
        Logger(folder),
        args=Namespace(**VIDEO | REST | changed),
    )
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}, module


def limit(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A host has no limit of its own: this one stands for a card."""
    monkeypatch.setattr("wanshim.core.strategy.limits.available_bytes", lambda device: count)


def predicted_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, chunk: int | None, accumulation: int = 1) -> int:
    """What the adapter predicts for this run without kept attention, caught where it is decided."""
    seen: list[int] = []
    with monkeypatch.context() as patch:
        patch.setenv("WANSHIM_KEEP", "off")
        if chunk is not None:
            patch.setenv("WANSHIM_CHUNK", str(chunk))
        decide = launch.decide

        def decided(*given: Any) -> TrainingPlan:
            plan = decide(*given)
            seen.append(max(peak.total for peak in plan.peaks))
            return plan

        patch.setattr(launch, "decide", decided)
        wanshim.activate(hand_over.inherited())
        train(folder / f"measured{chunk}", accumulation)
    wanshim.activate(hand_over.inherited())  # with the variables of the test again
    return seen[0]
