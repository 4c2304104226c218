"""A LoRA training script as users of DiffSynth have it: knows nothing of wanshim, and names no device.

Writes OUTPUT/losses.RANK.json and, by DiffSynth's own logger, OUTPUT/epoch-0.safetensors; with `--task
sft:data_process` what DiffSynth keeps of each sample. Some of what users put into their scripts is an option.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from diffsynth.diffusion import (
    DiffusionTrainingModule,
    FlowMatchSFTLoss,
    ModelLogger,
    add_general_config,
    add_video_size_config,
    launch_data_process_task,
    launch_training_task,
)
from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline
from PIL import Image

from wanshim.demo import wan_checkpoint  # the tiny checkpoint's names and hashes, nothing else


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
        return {"video": frames, "prompt": f"clip {index}"}


class LoraTraining(DiffusionTrainingModule):  # type: ignore[misc]
    def __init__(self, args: argparse.Namespace, device: Any) -> None:
        super().__init__()
        self.args = args
        self.checkpoints = args.use_gradient_checkpointing or args.always_checkpoints
        self.losses: list[float] = []
        files = wan_checkpoint.CheckpointFiles(args.checkpoint)
        wan_checkpoint.register(files)
        self.pipe = WanVideoPipeline.from_pretrained(
            torch_dtype=getattr(torch, args.dtype),
            device=device,
            model_configs=[ModelConfig(path=str(path)) for path in files.models],
            tokenizer_config=ModelConfig(path=str(files.tokenizer)),
            redirect_common_files=False,
        )
        self.switch_pipe_to_training_mode(
            self.pipe, lora_base_model="dit", lora_target_modules="q,k,v,o,ffn.0,ffn.2", lora_rank=8
        )

    def forward(self, data: dict[str, Any], inputs: Any = None) -> Any:
        shared = {
            "input_video": data["video"], "width": self.args.width, "height": self.args.height,
            "num_frames": len(data["video"]), "cfg_scale": 1, "cfg_merge": False, "tiled": False, "vace_scale": 1,
            "rand_device": self.pipe.device, "use_gradient_checkpointing": self.checkpoints,
            "use_gradient_checkpointing_offload": False,
        }  # fmt: skip
        state: Any = (shared, {"prompt": data["prompt"]}, {})
        state = self.transfer_data_to_device(state, self.pipe.device, self.pipe.torch_dtype)
        for unit in self.pipe.units:
            state = self.pipe.unit_runner(unit, self.pipe, *state)
        if self.args.task == "sft:data_process":
            return {name: value for part in state for name, value in part.items() if isinstance(value, torch.Tensor)}
        loss = FlowMatchSFTLoss(self.pipe, **state[0], **state[1])
        self.losses.append(loss.item())
        return loss


class Logger(ModelLogger):  # type: ignore[misc]
    def __init__(self, args: argparse.Namespace, clip: dict[str, Any]) -> None:
        super().__init__(args.output_path, remove_prefix_in_ckpt="pipe.dit.")
        self.args, self.clip = args, clip
        self.means: list[float] = []

    def on_step_end(self, accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(accelerator, model, *args, **kwargs)
        module = accelerator.unwrap_model(model)
        if self.args.reduces:
            self.means.append(accelerator.reduce(self.loss(accelerator, module), "mean").item())
        if self.args.validates and accelerator.is_main_process:
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(1)
                loss = module(self.clip)
            print(f"validated {loss.item():.4f}", flush=True)

    def loss(self, accelerator: Any, module: Any) -> torch.Tensor:
        """That of the step: the releases of 2.0 do not hand it to a logger."""
        return torch.tensor(module.losses[-1], device=accelerator.device)


def main() -> None:
    parser = add_video_size_config(add_general_config(argparse.ArgumentParser()))
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samples", type=int, default=4)
    for option in ("always_checkpoints", "reduces", "validates", "stamped"):
        parser.add_argument(f"--{option}", action="store_true")
    args = parser.parse_args()
    if args.stamped:  # no two processes have the same
        args.output_path += f"/{time.time_ns()}"
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # so that two runs can be compared; attention takes no warning for it
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    # accelerate names the CPU of several processes cpu:0, which safetensors does not know
    model = LoraTraining(args, accelerator.device if accelerator.device.type != "cpu" else "cpu")
    clips = Clips(args)
    logger = Logger(args, clips[0])
    launch = launch_data_process_task if args.task == "sft:data_process" else launch_training_task
    launch(accelerator, clips, model, logger, args=args)
    if model.losses:
        Path(args.output_path).mkdir(parents=True, exist_ok=True)  # rank 0, which saves, may not have made it yet
        Path(args.output_path, f"losses.{accelerator.process_index}.json").write_text(
            json.dumps(logger.means or model.losses)
        )


if __name__ == "__main__":
    main()
