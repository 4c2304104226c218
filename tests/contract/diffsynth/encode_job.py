"""A LoRA training as its user writes it, on video files: losses, files, and how often each model encoded.

`train` writes FOLDER/seen.RANK.ATTEMPT.jsonl, a line for each forward, and FOLDER/encoded.RANK.ATTEMPT.jsonl, a line
for each call of the VAE's encode and of the text encoder.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imageio
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffsynth.core import UnifiedDataset
from diffsynth.diffusion import ModelLogger

from wanshim.adapters.diffsynth.resuming.run import ended
from wanshim.demo import train_lora, wan_checkpoint

HEIGHT, WIDTH, FRAMES = 32, 32, 5
VIDEOS = 3


def write_data(folder: Path, kind: str = "mp4", videos: int = VIDEOS) -> Path:
    """Video files and their metadata; neighbouring videos have two prompts in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(videos):
        frames = np.random.default_rng(number).integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)
        options = {"fps": 24, "macro_block_size": 1} if kind == "mp4" else {}
        imageio.mimwrite(folder / f"{number}.{kind}", list(frames), **options)
        rows.append({"video": f"{number}.{kind}", "prompt": ("a ball", "a box")[number % 2]})
    (folder / "metadata.json").write_text(json.dumps(rows))
    return folder


def write_checkpoint(folder: Path, seed: int = 0) -> wan_checkpoint.CheckpointFiles:
    return wan_checkpoint.write(folder, seed=seed, dit=wan_checkpoint.DIT | {"num_layers": 2})


def dataset(data: Path, repeat: int = 1) -> UnifiedDataset:
    return UnifiedDataset(
        base_path=str(data),
        metadata_path=str(data / "metadata.json"),
        repeat=repeat,
        data_file_keys=("video",),
        main_data_operator=UnifiedDataset.default_video_operator(
            base_path=str(data), height=HEIGHT, width=WIDTH, num_frames=FRAMES
        ),
    )


class Flipped(UnifiedDataset):  # type: ignore[misc]
    """Frames that a draw of the dataset's mirrors and shifts."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        shift = random.randrange(1_000_000)
        sample["video"] = [frame.point(lambda value, shift=shift: (value + shift) % 256) for frame in sample["video"]]
        return sample  # type: ignore[no-any-return]


@cache
def _loaded(checkpoint: Path) -> train_lora.LoraTraining:
    """A module as its script makes it; a test makes several, and reading the files takes longer than an epoch."""
    files = wan_checkpoint.CheckpointFiles(checkpoint)
    wan_checkpoint.register(files, dit=wan_checkpoint.DIT | {"num_layers": 2})
    torch.manual_seed(11)
    return train_lora.LoraTraining(files, torch.device("cpu"), 2, checkpointing=True)


class Training(train_lora.LoraTraining):
    """Args: seen, encoded: files; killed, killed_at: as of `train`."""

    def __init__(
        self, checkpoint: Path, seen: Path, encoded: Path, killed: int | None = None, killed_at: int | None = None
    ) -> None:
        torch.nn.Module.__init__(self)
        vars(self).update(vars(copy.deepcopy(_loaded(checkpoint))))
        # a user's module has none of these, and what begins so is of no account
        self._seen, self._encoded = seen, encoded
        self._left = SimpleNamespace(encodes=killed, forwards=killed_at)  # of this process
        for model, name in ((self.pipe.vae, "encode"), (self.pipe.text_encoder, "forward")):
            self._count(type(model), name)

    def _count(self, cls: type, name: str) -> None:
        """Count on the class: the instance stays plain."""
        original = vars(cls)[name]
        original = getattr(original, "counted", original)

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            with self._encoded.open("a") as file:
                file.write(f"{name}\n")
            time.sleep(float(os.environ.get("ENCODE_PAUSE_S", 0)))
            if name == "encode" and self._left.encodes is not None:
                self._left.encodes -= 1
                if self._left.encodes < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(model, *args, **kwargs)

        call.counted = original  # type: ignore[attr-defined]
        setattr(cls, name, call)

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        if self._left.forwards is not None:
            self._left.forwards -= 1
            if self._left.forwards < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        loss = super().forward(data, inputs)
        with self._seen.open("a") as file:
            file.write(json.dumps([data["prompt"], loss.item()]) + "\n")
        return loss


def train(
    folder: Path, data: Path, checkpoint: Path, epochs: int = 3, accumulation: int = 1, attempt: int = 0,
    killed: int | None = None, killed_at: int | None = None, seed: int = 5, repeat: int = 1,
    change: Callable[[Any], None] | None = None, samples: Any = None, **options: Any,
) -> Training:  # fmt: skip
    """Args: killed, killed_at: after so many calls of the VAE's encode, or forwards; change: of the module."""
    from diffsynth.diffusion import runner

    ended.clear()  # as in a new process
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    rank = accelerator.process_index
    folder.mkdir(parents=True, exist_ok=True)
    module = Training(
        checkpoint,
        *(folder / f"{kind}.{rank}.{attempt}.jsonl" for kind in ("seen", "encoded")),
        killed,
        killed_at,
    )
    if change is not None:
        change(module)
    for draw in (torch.manual_seed, random.seed, np.random.seed):
        draw(seed)
    logger = ModelLogger(str(folder), remove_prefix_in_ckpt="pipe.dit.")
    runner.launch_training_task(
        accelerator, samples or dataset(data, repeat), module, logger, learning_rate=1e-2, num_workers=0,
        num_epochs=epochs, **options,
    )  # fmt: skip
    return module


def lines(folder: Path, kind: str) -> list[str]:
    return [line for path in sorted(folder.glob(f"{kind}.*.jsonl")) for line in path.read_text().splitlines()]


def losses(folder: Path) -> list[str]:
    return lines(folder, "seen")


def encoded(folder: Path) -> dict[str, int]:
    """How often the VAE and the text encoder were called."""
    found = lines(folder, "encoded")
    return {name: found.count(name) for name in ("encode", "forward")}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
