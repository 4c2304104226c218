"""LoRA training of a tiny checkpoint on one clip, with text encoder and VAE."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffsynth.diffusion import ModelLogger
from safetensors.torch import load_file

from wanshim.demo import clip, train_lora, wan_checkpoint

FEATURE = "diffsynth.model_split"


def make_module(files: wan_checkpoint.CheckpointFiles) -> train_lora.LoraTraining:
    return train_lora.LoraTraining(files, torch.device("cpu"), rank=4, checkpointing=True)


@cache
def frames() -> Any:
    """Of a real clip, read by DiffSynth's own operator."""
    from diffsynth.core import UnifiedDataset

    return UnifiedDataset.default_video_operator(height=32, width=48, num_frames=5)(str(clip.find()))


class OneClip(torch.utils.data.Dataset):
    """Three items of the same frames."""

    load_from_cache = False

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"video": frames(), "prompt": "a clip"}


def train(module: train_lora.LoraTraining, output: Path) -> dict[str, torch.Tensor]:
    """Two optimizer steps of DiffSynth's runner: accumulation 2 over 3 items, the last group partial."""
    # Taken from its module at call time, as a user's script takes it after wanshim is active.
    from diffsynth.diffusion import runner

    torch.manual_seed(3)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    logger = ModelLogger(str(output), remove_prefix_in_ckpt="pipe.dit.")
    runner.launch_training_task(accelerator, OneClip(), module, logger, learning_rate=1e-2, num_workers=0)
    return load_file(output / "epoch-0.safetensors")
