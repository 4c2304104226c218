"""A DiffSynth LoRA job for the tests of `diffsynth.progress`: a script, started once a process.

Its model is tiny, so each item of its dataset takes a moment to read: the steps then have a pace of their own.
With --clock these moments pass on a clock of the job's, which the recorder reads in place of the machine's: nobody
waits for them, and a busy machine makes no step longer.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffsynth.core import UnifiedDataset
from diffsynth.diffusion import ModelLogger, launch_training_task

from wanshim.core.model_split import split_model
from wanshim.demo import clip, train_lora, wan_checkpoint

FIRST_S, OPTIMIZER_S, SAVE_S = 30.0, 0.7, 2.0  # with --clock: what a first step, an optimizer step and a save take


class Clock:
    """In place of the module `time`: nothing passes but what is slept."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now

    perf_counter = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowClips(torch.utils.data.Dataset):
    load_from_cache = False

    def __init__(self, count: int, seconds: float, nan_at: int, clock: Any = time) -> None:
        read = UnifiedDataset.default_video_operator(height=32, width=32, num_frames=1)
        self.video = read(str(clip.find()))
        self.count, self.seconds, self.nan_at, self.clock = count, seconds, nan_at, clock
        self.given = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = isinstance(self.clock, Clock) and not self.given
        self.clock.sleep(self.seconds + FIRST_S * first)
        self.given += 1
        return {"video": self.video, "prompt": "a clip", "nan": self.given == self.nan_at}


class Training(train_lora.LoraTraining):
    def forward(self, data: dict[str, Any], inputs: Any = None) -> torch.Tensor:
        loss = super().forward(data, inputs)
        print(json.dumps({"own loss": loss.item()}))  # on each rank; the demo's script prints on the first alone
        return loss * float("nan") if data["nan"] else loss


def instrument(clock: Clock | None, replace: Callable[[Any, str, Any], None] = setattr) -> list[None]:
    """Let a recorder read `clock`, where optimizer steps and saves take their time too.

    Returns:
        A list that grows with each optimizer step: what happened, counted by the optimizer itself.
    """
    from wanshim.core.training import recorder

    if clock is not None:
        replace(recorder, "time", clock)
    replace(Accelerator, "save", _counting(Accelerator.save, [], clock, SAVE_S))
    steps: list[None] = []
    replace(torch.optim.AdamW, "step", _counting(torch.optim.AdamW.step, steps, clock, OPTIMIZER_S))
    return steps


def _counting(original: Any, calls: list[None], clock: Clock | None, seconds: float) -> Any:
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if clock is not None:
            clock.sleep(seconds)
        return original(*args, **kwargs)

    return counting


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train; what was done, counted by those who did it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--save-steps", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--nan-at", type=int, default=0)
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--split", action="store_true")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    files = wan_checkpoint.CheckpointFiles(args.checkpoint)
    wan_checkpoint.register(files)
    if args.split:
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation, cpu=True)
    module = Training(files, torch.device("cpu"), rank=2, checkpointing=False)
    if args.split:
        split_model(module.pipe.dit, ["cpu", "cpu"], blocks="blocks")
    clock = Clock() if args.clock else None
    optimizer_steps = instrument(clock)
    dataset = SlowClips(args.samples, args.seconds, args.nan_at, clock or time)
    logger = ModelLogger(str(args.output), remove_prefix_in_ckpt="pipe.dit.")
    launch_training_task(
        accelerator, dataset, module, logger, num_workers=0, num_epochs=args.epochs, save_steps=args.save_steps
    )
    return {"micro": logger.num_steps, "optimizer": len(optimizer_steps)}


if __name__ == "__main__":
    main()
