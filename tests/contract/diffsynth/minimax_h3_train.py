"""A LoRA training script of MiniMax-H3 as users of DiffSynth have it: knows nothing of wanshim, and names no device.

Latents of video and audio are encoded in the loop, or once by `--task sft:data_process`. A prompt is an embedding.
Writes OUTPUT/losses.RANK.json and, by DiffSynth's own logger, OUTPUT/epoch-0.safetensors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from diffsynth.core import UnifiedDataset
from diffsynth.diffusion import (
    DiffusionTrainingModule,
    ModelLogger,
    add_general_config,
    add_video_size_config,
    launch_data_process_task,
    launch_training_task,
)
from diffsynth.diffusion.loss import FlowMatchSFTMiniMaxH3AudioVideoLoss
from diffsynth.pipelines.minimax_h3_audio_video import MiniMaxH3Pipeline, ModelConfig
from PIL import Image

from tests.contract.diffsynth import minimax_h3  # the tiny checkpoint's names and hashes, nothing else


class Clips(torch.utils.data.Dataset):  # type: ignore[type-arg]
    load_from_cache = False

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def __len__(self) -> int:
        return int(self.args.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = np.random.default_rng(index)
        size = (self.args.height, self.args.width, 3)
        frames = [Image.fromarray(draws.integers(0, 256, size, dtype=np.uint8)) for _ in range(self.args.num_frames)]
        audio = torch.from_numpy(draws.standard_normal((2, 800 * round(len(frames) / 24 * 40)), dtype=np.float32))
        text = torch.from_numpy(draws.standard_normal((5 + index, 32), dtype=np.float32))
        return {"video": frames, "input_audio": (audio, 32000), "text_embedding": text}


class LoraTraining(DiffusionTrainingModule):  # type: ignore[misc]
    def __init__(self, args: argparse.Namespace, device: Any) -> None:
        super().__init__()
        self.args, self.task = args, args.task
        self.use_gradient_checkpointing = args.use_gradient_checkpointing
        self.use_gradient_checkpointing_offload = args.use_gradient_checkpointing_offload
        self.losses: list[float] = []
        files = minimax_h3.CheckpointFiles(args.checkpoint)
        minimax_h3.register(files)
        models = files.models[:1] if args.task == "sft:train" else files.models
        self.pipe = MiniMaxH3Pipeline.from_pretrained(
            torch_dtype=getattr(torch, args.dtype),
            device=device,
            model_configs=[ModelConfig(path=str(path)) for path in models],
            processor_config=None,
        )
        self.pipe = self.split_pipeline_units(
            args.task,
            self.pipe,
            None,
            "dit",
            remove_unnecessary_params=True,
            force_remove_params_shared=("video_latents", "audio_latents"),
            force_remove_params_nega=("prompt_embeds", "text_token_tags", "packed"),
        )
        self.switch_pipe_to_training_mode(
            self.pipe,
            lora_base_model="dit",
            lora_target_modules="qkv_proj,out_proj,fc1,fc2",
            lora_rank=8,
            task=args.task,
        )
        self.pipe.scheduler_audio.set_timesteps(1000, training=True)

    def get_pipeline_inputs(self, data: dict[str, Any]) -> Any:
        shared = {
            "input_video": data["video"],
            "input_audio": data["input_audio"],
            "text_embedding": data["text_embedding"],
            "height": data["video"][0].size[1],
            "width": data["video"][0].size[0],
            "num_frames": len(data["video"]),
            "cfg_scale": 1,
            "seed": 42,
            "rand_device": "cpu",
            "use_gradient_checkpointing": self.use_gradient_checkpointing,
            "use_gradient_checkpointing_offload": self.use_gradient_checkpointing_offload,
        }
        return shared, {"prompt": None}, {}

    def forward(self, data: dict[str, Any], inputs: Any = None) -> Any:
        if inputs is None:
            inputs = self.get_pipeline_inputs(data)
        inputs = self.transfer_data_to_device(inputs, self.pipe.device, self.pipe.torch_dtype)
        for unit in self.pipe.units:
            inputs = self.pipe.unit_runner(unit, self.pipe, *inputs)
        if self.task == "sft:data_process":
            return inputs
        loss = FlowMatchSFTMiniMaxH3AudioVideoLoss(self.pipe, **inputs[0], **inputs[1])
        self.losses.append(loss.item())
        return loss


def main() -> None:
    parser = add_video_size_config(add_general_config(argparse.ArgumentParser()))
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")  # the VAE's bf16 takes seconds on a CPU
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # so that two runs can be compared
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    # accelerate names the CPU of several processes cpu:0, which safetensors does not know
    model = LoraTraining(args, accelerator.device if accelerator.device.type != "cpu" else "cpu")
    cached = args.task == "sft:train"
    samples = UnifiedDataset(base_path=args.dataset_base_path, metadata_path=None, repeat=1) if cached else Clips(args)
    logger = ModelLogger(args.output_path, remove_prefix_in_ckpt="pipe.dit.")
    launch = launch_data_process_task if args.task == "sft:data_process" else launch_training_task
    launch(accelerator, samples, model, logger, args=args)
    if model.losses:
        Path(args.output_path).mkdir(parents=True, exist_ok=True)  # rank 0, which saves, may not have made it yet
        Path(args.output_path, f"losses.{accelerator.process_index}.json").write_text(json.dumps(model.losses))


if __name__ == "__main__":
    main()
