"""A DiffSynth LoRA job for the tests of `diffsynth.progress`: a script, started once a process.

Its model is tiny, so each item of its dataset takes a moment to read: the steps then have a pace of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffsynth.core import UnifiedDataset
from diffsynth.diffusion import ModelLogger, launch_training_task

from wanshim.cli.demo import clip, train_lora, wan_checkpoint
from wanshim.core.placement import split_model


class SlowClips(torch.utils.data.Dataset):
    load_from_cache = False

    def __init__(self, count: int, seconds: float, nan_at: int) -> None:
        read = UnifiedDataset.default_video_operator(height=32, width=32, num_frames=1)
        self.video, self.count, self.seconds, self.nan_at, self.given = (
            read(str(clip.find())),
            count,
            seconds,
            nan_at,
            0,
        )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.given += 1
        return {"video": self.video, "prompt": "a clip", "nan": self.given == self.nan_at}


class Training(train_lora.LoraTraining):
    def forward(self, data: dict[str, Any], inputs: Any = None) -> torch.Tensor:
        loss = super().forward(data, inputs)
        return loss * float("nan") if data["nan"] else loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--save-steps", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--nan-at", type=int, default=0)
    parser.add_argument("--split", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    files = wan_checkpoint.CheckpointFiles(args.checkpoint)
    wan_checkpoint.register(files)
    if args.split:
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation, cpu=True)
    module = Training(files, torch.device("cpu"), rank=2, checkpointing=False)
    if args.split:
        split_model(module.pipe.dit, ["cpu", "cpu"], blocks="blocks")
    steps = {"micro": 0, "optimizer": 0}
    step_of_adamw = torch.optim.AdamW.step

    def counting(*a: Any, **k: Any) -> Any:
        steps["optimizer"] += 1
        return step_of_adamw(*a, **k)

    torch.optim.AdamW.step = counting  # what happened, counted by the optimizer itself
    dataset = SlowClips(args.samples, args.seconds, args.nan_at)
    logger = ModelLogger(str(args.output), remove_prefix_in_ckpt="pipe.dit.")
    begin = time.time()
    launch_training_task(
        accelerator, dataset, module, logger, num_workers=0, num_epochs=args.epochs, save_steps=args.save_steps
    )
    done = {"micro": logger.num_steps, "optimizer": steps["optimizer"], "seconds": time.time() - begin}
    print("DONE " + json.dumps({"rank": accelerator.process_index, **done}), flush=True)


if __name__ == "__main__":
    main()
