"""A training as its user starts it, in one or several processes: its losses, what it drew, and its end.

`train` writes FOLDER/seen.RANK.ATTEMPT.jsonl, a line for each forward.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffsynth.diffusion import runner

from tests.contract.diffsynth.training import Logger, Samples, Training


class Drawing(Samples):
    """Each sample draws from all that training draws from, as random augmentation does."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "noise": [torch.rand(()).item(), random.random(), np.random.rand()]}


class Job(Training):
    def __init__(self, seen: Path, at: int | None, end: str | None) -> None:
        super().__init__()
        self.seen_in, self.at, self.end, self.count = seen, at, end, 0

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        if self.count == self.at and self.end is not None:
            if self.end == "error":
                raise torch.OutOfMemoryError("no room for this one")
            os.kill(os.getpid(), signal.Signals[self.end])
        self.count += 1
        loss = super().forward(data, inputs)
        with self.seen_in.open("a") as file:
            file.write(json.dumps([data["number"], data["noise"], loss.item()]) + "\n")
        return loss


def train(
    folder: Path, seed: int = 5, at: int | None = None, end: str | None = None, accumulation: int = 1,
    workers: int = 0, epochs: int = 2, samples: int = 7, attempt: int = 0, only: int | None = None,
    dataset: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Args: at, end: the forward in which the process ends, and how: a signal's name or "error"; only: in this rank."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    rank = accelerator.process_index
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(11)
    module = Job(folder / f"seen.{rank}.{attempt}.jsonl", at, end if only in (None, rank) else None)
    for draw in (torch.manual_seed, random.seed, np.random.seed):
        draw(seed)
    options = {"learning_rate": 1e-2, **options}
    runner.launch_training_task(
        accelerator,
        dataset or Drawing(samples),
        module,
        Logger(folder),
        num_workers=workers,
        num_epochs=epochs,
        **options,
    )


def seen(folder: Path, rank: int, attempt: int) -> list[Any]:
    path = folder / f"seen.{rank}.{attempt}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
