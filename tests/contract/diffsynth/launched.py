"""A run of DiffSynth's launcher, what a feature says of it, and a call of it that is only looked at."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import runner
from safetensors.torch import load_file

import wanshim
from tests.contract.diffsynth import variants
from tests.contract.diffsynth.training import Logger, Samples, Training
from wanshim.adapters.diffsynth.training_road import Step, TrainingCall


def train(folder: Path, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """Every tensor of every file that the run writes."""
    torch.manual_seed(11)
    runner.launch_training_task(
        Accelerator(gradient_accumulation_steps=accumulation), Samples(4), Training(), Logger(folder),
        learning_rate=1e-2, num_workers=0, save_steps=2,
    )  # fmt: skip
    return {f"{path.name} {name}": t for path in sorted(folder.glob("*")) for name, t in load_file(path).items()}


@cache
def plain(accumulation: int = 1) -> dict[str, torch.Tensor]:
    """The same of DiffSynth's own run, where nothing is active."""
    with TemporaryDirectory() as folder:
        return train(Path(folder), accumulation)


def notes(feature: str) -> str:
    return "\n".join(wanshim.report().row(feature).notes)


def least_cosine(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of the tensors of two runs, which have the same names."""
    assert found.keys() == expected.keys()
    ours, theirs = ({n: t.double().flatten() for n, t in files.items()} for files in (found, expected))
    return min(torch.cosine_similarity(ours[n], theirs[n], dim=0).item() for n in theirs)


def refuse(step: Step, reason: str, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(vars(step), "refusal", lambda *_: reason)  # its class is frozen


def check_refusal_is_reported(
    step: Step, variables: dict[str, str], split: bool, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    """A run whose step is refused is DiffSynth's own, alone and over a split, and the report says why."""
    expected = plain()
    refuse(step, "no kernel", patch)
    for name, value in {**variables, **({"DEVICES": "cpu,cpu"} if split else {})}.items():
        patch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{step.feature}" + ",diffsynth.model_split" * split)
    found = train(folder / "ours")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert f"{step.without}: no kernel" in notes(step.feature)
    row = wanshim.report().row(step.feature)
    assert (row.state, row.fallbacks) == ("ineffective", {f"{step.without}: no kernel": 1})


def call(dit: Any = None, state: Any = None, **pipe: object) -> TrainingCall:
    state = state or SimpleNamespace(deepspeed_plugin=None)
    dit = dit or variants.tiny("t2v").dit
    return TrainingCall(
        accelerator=SimpleNamespace(state=state, device=torch.device("cpu")),
        model=SimpleNamespace(pipe=SimpleNamespace(dit=dit, **pipe)),
        logger=None, dataset=None, options={}, script=None,
    )  # fmt: skip
