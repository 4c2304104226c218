"""A DiffSynth LoRA training job as its users write it: knows nothing of wanshim.

    python -m wanshim.demo.train_lora --checkpoint DIR --video CLIP.mp4 --output DIR

Prints one JSON line a micro-batch on standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffsynth.core import UnifiedDataset
from diffsynth.diffusion import DiffusionTrainingModule, FlowMatchSFTLoss, ModelLogger, launch_training_task
from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline

from wanshim.demo import wan_checkpoint

TARGETS = "q,k,v,o,ffn.0,ffn.2"
RANK, SEED = 8, 0
HEIGHT, WIDTH = 64, 96


class LoraTraining(DiffusionTrainingModule):  # type: ignore[misc]
    """Text-to-video LoRA on the DiT, everything else frozen."""

    def __init__(self, files: wan_checkpoint.CheckpointFiles, device: Any, rank: int, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.pipe = WanVideoPipeline.from_pretrained(
            torch_dtype=torch.bfloat16,
            device=device,
            model_configs=[ModelConfig(path=str(path)) for path in files.models],
            tokenizer_config=ModelConfig(path=str(files.tokenizer)),
            redirect_common_files=False,
        )
        self.switch_pipe_to_training_mode(self.pipe, lora_base_model="dit", lora_target_modules=TARGETS, lora_rank=rank)

    def forward(self, data: dict[str, Any], inputs: Any = None) -> torch.Tensor:
        video = data["video"]
        width, height = video[0].size
        shared = {
            "input_video": video,
            "width": width,
            "height": height,
            "num_frames": len(video),
            "cfg_scale": 1,
            "cfg_merge": False,
            "tiled": False,
            "vace_scale": 1,
            "rand_device": self.pipe.device,
            "use_gradient_checkpointing": self.checkpointing,
            "use_gradient_checkpointing_offload": False,
        }
        state: Any = (shared, {"prompt": data["prompt"]}, {})
        state = self.transfer_data_to_device(state, self.pipe.device, self.pipe.torch_dtype)
        for unit in self.pipe.units:
            state = self.pipe.unit_runner(unit, self.pipe, *state)
        loss = FlowMatchSFTLoss(self.pipe, **state[0], **state[1])
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            print(json.dumps({"loss": loss.item()}), flush=True)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--video", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulation", type=int, default=2)
    args = parser.parse_args()

    files = wan_checkpoint.CheckpointFiles(args.checkpoint)
    wan_checkpoint.register(files)
    torch.manual_seed(SEED)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
    metadata = args.output / "metadata.json"
    args.output.mkdir(parents=True, exist_ok=True)
    if accelerator.is_main_process:
        metadata.write_text(json.dumps([{"video": str(args.video), "prompt": "a clip"}]), encoding="utf-8")
    accelerator.wait_for_everyone()
    dataset = UnifiedDataset(
        base_path="",
        metadata_path=str(metadata),
        repeat=args.steps * args.accumulation,
        data_file_keys=("video",),
        main_data_operator=UnifiedDataset.default_video_operator(height=HEIGHT, width=WIDTH, num_frames=args.frames),
    )
    # accelerate names the CPU of several processes cpu:0, which safetensors does not know
    device = accelerator.device if accelerator.device.type != "cpu" else torch.device("cpu")
    model = LoraTraining(files, device, RANK, checkpointing=True)
    logger = ModelLogger(str(args.output), remove_prefix_in_ckpt="pipe.dit.")
    launch_training_task(accelerator, dataset, model, logger, learning_rate=1e-3, num_workers=0)
    if "wanshim" in sys.modules and accelerator.is_main_process:
        _print_report()


def _print_report() -> None:
    import wanshim

    for row in wanshim.report().selected:
        print(json.dumps({"feature": row.feature, "state": row.state, "calls": row.calls, "notes": row.notes}))


if __name__ == "__main__":
    main()
