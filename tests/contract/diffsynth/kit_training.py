"""A training run of one step for the contract kit, from loading a checkpoint to the saved LoRA."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffsynth.diffusion import ModelLogger, runner
from diffsynth.models.model_loader import ModelPool
from diffsynth.pipelines import flux2_image, wan_video

from tests.contract.diffsynth import progress_job
from wanshim.demo import wan_checkpoint


def train_one_step(micro_batches: int = 1) -> dict[str, torch.Tensor]:
    """The LoRA that one step on a tiny Wan gives, in a run of one process, whatever launched it."""
    from safetensors.torch import load_file

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        files = wan_checkpoint.write(Path(folder, "checkpoint"))
        wan_checkpoint.register(files)
        module = progress_job.Training(files, torch.device("cpu"), rank=2, checkpointing=False)
        logger = ModelLogger(folder, remove_prefix_in_ckpt="pipe.dit.")
        clips = progress_job.SlowClips(micro_batches, 0.0, nan_at=0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
        runner.launch_training_task(accelerator, clips, module, logger, num_workers=0)
        return load_file(str(Path(folder, "epoch-0.safetensors")))


def train_two_accumulated() -> dict[str, torch.Tensor]:
    return train_one_step(micro_batches=2)


def logger() -> Any:
    return ModelLogger("nowhere")


def load_train_and_cache() -> list[Any]:
    """A training run, a FLUX.2 pipeline without models, and one residual of TeaCache."""
    flux = flux2_image.Flux2ImagePipeline.from_pretrained(model_configs=[], tokenizer_config=None, device="cpu")
    cache = tea_cache()
    cache.previous_hidden_states = torch.ones(2)
    cache.store(torch.full((2,), 3.0))
    return [train_one_step(), flux.dit is None, cache.previous_residual]


def tea_cache() -> Any:
    return wan_video.TeaCache(num_inference_steps=2, rel_l1_thresh=0.1, model_id="Wan2.1-T2V-1.3B")


def patched_objects() -> tuple[Any, ...]:
    """One of each class that model_split patches a method of."""
    return tea_cache(), ModelPool()
