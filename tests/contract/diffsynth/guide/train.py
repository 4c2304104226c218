"""Stands in for examples/wanvideo/model_training/train.py, which lies in DiffSynth's repository and not in its wheel.

It takes the same command line by DiffSynth's own parsers and calls DiffSynth's own parts. The real script ran in
its place where DIFFSYNTH_CHECKOUT names a checkout, see test_training_guide.py.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from diffsynth.core import UnifiedDataset
from diffsynth.diffusion import (
    DiffusionTrainingModule,
    FlowMatchSFTLoss,
    ModelLogger,
    add_general_config,
    add_video_size_config,
    launch_training_task,
)
from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline


class Training(DiffusionTrainingModule):
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.args = args
        models = self.parse_model_configs(args.model_paths, args.model_id_with_origin_paths, device=device)
        tokenizer = ModelConfig(model_id="Wan-AI/Wan2.1-T2V-1.3B", origin_file_pattern="google/umt5-xxl/")
        self.pipe = WanVideoPipeline.from_pretrained(torch.bfloat16, device, models, tokenizer)
        self.switch_pipe_to_training_mode(
            self.pipe, args.trainable_models, args.lora_base_model, args.lora_target_modules, args.lora_rank,
            args.lora_checkpoint,
        )  # fmt: skip

    def forward(self, data: dict[str, Any], inputs: Any = None) -> torch.Tensor:
        video = data["video"]
        width, height = video[0].size
        shared = {"input_video": video, "width": width, "height": height, "num_frames": len(video), "tiled": False}
        if self.args.extra_inputs == "input_image":
            shared["input_image"] = video[0]
        shared |= {"cfg_scale": 1, "cfg_merge": False, "vace_scale": 1, "rand_device": self.pipe.device}
        shared |= {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": False}
        state: Any = (shared, {"prompt": data["prompt"]}, {})
        state = self.transfer_data_to_device(state, self.pipe.device, self.pipe.torch_dtype)
        for unit in self.pipe.units:
            state = self.pipe.unit_runner(unit, self.pipe, *state)
        return FlowMatchSFTLoss(self.pipe, **state[0], **state[1])


def main() -> None:
    parser = add_video_size_config(add_general_config(argparse.ArgumentParser()))
    parser.add_argument("--initialize_model_on_cpu", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    dataset = UnifiedDataset(
        base_path=args.dataset_base_path,
        metadata_path=args.dataset_metadata_path,
        repeat=args.dataset_repeat,
        data_file_keys=args.data_file_keys.split(","),
        main_data_operator=UnifiedDataset.default_video_operator(
            base_path=args.dataset_base_path, height=args.height, width=args.width, num_frames=args.num_frames
        ),
    )
    logger = ModelLogger(args.output_path, remove_prefix_in_ckpt=args.remove_prefix_in_ckpt)
    device = torch.device("cpu") if args.initialize_model_on_cpu else accelerator.device
    launch_training_task(accelerator, dataset, Training(args, device), logger, args=args)


if __name__ == "__main__":
    main()
