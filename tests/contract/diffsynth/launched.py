"""A run of DiffSynth's launcher, what a feature says of it, and a call of it that is only looked at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from diffsynth.diffusion import runner
from safetensors.torch import load_file

import wanshim
from tests.contract.diffsynth import variants
from tests.contract.diffsynth.training import Logger, Samples, Training
from wanshim.adapters.diffsynth.training_call import TrainingCall


def train(folder: Path, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """Every tensor of every file that the run writes."""
    torch.manual_seed(11)
    runner.launch_training_task(
        Accelerator(gradient_accumulation_steps=accumulation), Samples(4), Training(), Logger(folder),
        learning_rate=1e-2, num_workers=0, save_steps=2,
    )  # fmt: skip
    return {f"{path.name} {name}": t for path in sorted(folder.glob("*")) for name, t in load_file(path).items()}


def notes(feature: str) -> str:
    return "\n".join(wanshim.report().row(feature).notes)


def call(dit: Any = None, state: Any = None, **pipe: object) -> TrainingCall:
    state = state or SimpleNamespace(deepspeed_plugin=None)
    dit = dit or variants.tiny("t2v").dit
    return TrainingCall(
        accelerator=SimpleNamespace(state=state, device=torch.device("cpu")),
        model=SimpleNamespace(pipe=SimpleNamespace(dit=dit, **pipe)),
        logger=None, dataset=None, options={}, script=None,
    )  # fmt: skip
