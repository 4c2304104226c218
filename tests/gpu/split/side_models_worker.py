"""Training with text encoder and VAE in every step; `accelerate launch -m` starts one a rank."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import ModelLogger, runner
from PIL import Image

import wanshim
from tests.contract.diffsynth.small_video import VIDEO
from tests.contract.diffsynth.video_job import REST
from wanshim.core.model_split.side_models import moved_to
from wanshim.demo import train_lora, wan_checkpoint


class Clips(torch.utils.data.Dataset):  # type: ignore[type-arg]
    load_from_cache = False

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, object]:
        frames = [Image.new("RGB", (48, 32), (40 * frame, 90 * index, 120)) for frame in range(5)]
        return {"video": frames, "prompt": "a clip"}


def send_away(patch: pytest.MonkeyPatch, place: str) -> None:
    """Text encoder and VAE go there, as if they did not fit."""
    leaving = dict.fromkeys(("text_encoder", "vae"), place)
    patch.setattr(
        sys.modules["wanshim.core.strategy.search"], "choose_devices", lambda sizes, *_: leaving if sizes else {}
    )


def train(files: wan_checkpoint.CheckpointFiles, folder: Path) -> train_lora.LoraTraining:
    accelerator = Accelerator()
    torch.manual_seed(2)
    module = train_lora.LoraTraining(files, accelerator.device, rank=4, checkpointing=True)
    torch.manual_seed(3)
    logger = ModelLogger(str(folder), remove_prefix_in_ckpt="pipe.dit.")
    runner.launch_training_task(accelerator, Clips(), module, logger, args=Namespace(**VIDEO | REST))
    return module


def lora_of(folder: Path) -> bytes:
    return (folder / "epoch-0.safetensors").read_bytes()


def main(folder: Path) -> None:
    torch.use_deterministic_algorithms(True)
    rank = os.environ["RANK"]
    files = wan_checkpoint.write(folder / f"checkpoint{rank}")
    wan_checkpoint.register(files)
    with pytest.MonkeyPatch.context() as patch:
        if "GUESTS" in os.environ:
            send_away(patch, os.environ["GUESTS"])
            wanshim.activate("none,diffsynth.model_split")
        pipe = train(files, folder).pipe
    (folder / f"side_models{rank}").write_text(f"{moved_to(pipe.text_encoder)} {moved_to(pipe.vae)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
