"""DiffSynth's own training loop on MiniMax-H3's DiT of full size, as a user starts it.

    python benchmarks/minimax_h3_training.py --json benchmarks/results/minimax_h3_training_1xH200.json
    wanshim run --gpus 1 -- python benchmarks/minimax_h3_training.py --gib 24
    wanshim run --gpus 4 -- python benchmarks/minimax_h3_training.py
    wanshim run --gpus 1 -- python benchmarks/minimax_h3_training.py --layers 2 --hidden 48 --heads 4 --ffn 64 \
        --time 24 --text-dim 32 --rank 4 --height 64 --width 96 --frames 22

Weights are random, of the shapes that MiniMax has released: 50 blocks of width 5376, 32 billion parameters, bf16, PEFT
LoRA r=32, gradient checkpointing, AdamW, accumulation 1. A sample is 124 frames of 480x832 with their sound and 512
tokens of a prompt, cached as DiffSynth's data processing keeps them. Prints and records as sequence_training.py does,
and takes its --gib; started without wanshim it is DiffSynth alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base
import sequence_training
from diffsynth.diffusion import DiffusionTrainingModule
from diffsynth.diffusion.loss import FlowMatchSFTMiniMaxH3AudioVideoLoss
from diffsynth.models.minimax_h3_dit import MiniMaxH3DiT
from diffsynth.pipelines.minimax_h3_audio_video import MiniMaxH3Pipeline

TARGETS = ["qkv_proj", "out_proj", "fc1", "fc2"]


def build(args: argparse.Namespace, device: str) -> MiniMaxH3DiT:
    """The DiT with LoRA, random, on one device."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = MiniMaxH3DiT(
            num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads, ffn_hidden_size=args.ffn,
            text_dim=args.text_dim, time_embed_hidden_size=args.hidden, time_embed_dim=args.time,
            adaln_out_features=18 * args.hidden, final_adaln_out_features=2 * args.hidden,
        )  # fmt: skip
    model = model.to(torch.bfloat16).to_empty(device=device)
    return base.with_lora(model, args.rank, TARGETS, device)


class Samples(sequence_training.Samples):
    """Latents of video and sound, and a prompt, packed by the pipeline's own units."""

    def _make(self, index: int) -> Any:
        args, generator = self.args, torch.Generator().manual_seed(index)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.bfloat16)

        pipe = MiniMaxH3Pipeline(device="cpu", torch_dtype=torch.bfloat16)
        size = {"num_frames": args.frames, "height": args.height, "width": args.width, "cfg_scale": 1}
        latents = noise(1, 24, (args.frames - 5) // 17 * 5 + 2, args.height // 16, args.width // 16)
        audio = noise(2, 32, round(args.frames / 24 * 40))
        shared = size | {"video_latents": latents, "audio_latents": audio, "text_embedding": noise(512, args.text_dim)}
        inputs: Any = (shared, {"prompt": None}, {})
        for unit in pipe.units[-4:-1]:  # of references, prompts and packing
            inputs = pipe.unit_runner(unit, pipe, *inputs)
        return size | {"input_latents": latents, "audio_input_latents": audio}, *inputs[1:]


class Training(DiffusionTrainingModule):  # type: ignore[misc]
    """As examples/minimax_h3/model_training/train.py has it, of samples that are cached."""

    def __init__(self, dit: Any, device: torch.device) -> None:
        super().__init__()
        self.pipe = MiniMaxH3Pipeline(device=device, torch_dtype=torch.bfloat16)
        self.pipe.dit = dit
        for scheduler in (self.pipe.scheduler, self.pipe.scheduler_audio):
            scheduler.set_timesteps(1000, training=True)

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        inputs = self.transfer_data_to_device(inputs or data, self.pipe.device, self.pipe.torch_dtype)
        shared, positive, _ = inputs
        shared |= {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": False}
        return FlowMatchSFTMiniMaxH3AudioVideoLoss(self.pipe, **shared, **positive)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sequence_training.add_options(parser)
    for name, value in {
        "layers": 50, "hidden": 5376, "ffn": 14336, "heads": 56, "time": 2688, "text-dim": 5120, "rank": 32,
        "height": 480, "width": 832, "frames": 124, "repeats": 3,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    sequence_training.run(parser.parse_args(), build, Samples, Training)


if __name__ == "__main__":
    main()
