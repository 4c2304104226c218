"""A script of a user whose models do not fit: it offloads them in the way that its argument names, and makes videos of
two sizes, two at once, with a LoRA that is on from the third call on. Writes frames.pt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig

from tests.contract.diffusers import wan_pipelines

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def group(pipe: Any, kind: str, **options: Any) -> None:
    for model in (pipe.transformer, pipe.transformer_2):
        if model is not None:
            model.enable_group_offload(DEVICE, torch.device("cpu"), kind, **options)
    pipe.vae.to(DEVICE)


WAYS: dict[str, Callable[[Any], Any]] = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(device=DEVICE),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device=DEVICE),
    "block": lambda pipe: group(pipe, "block_level", num_blocks_per_group=1),
    "leaf": lambda pipe: group(pipe, "leaf_level"),
    "stream": lambda pipe: group(pipe, "leaf_level", use_stream=True),
    "none": lambda pipe: pipe.to(DEVICE),
}

if __name__ == "__main__":
    way, kind = sys.argv[1:3]
    pipe = getattr(wan_pipelines, kind)()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "lora")
    pipe.transformer.disable_adapters()
    WAYS[way](pipe)
    made = [wan_pipelines.generate(pipe, kind, prompts=2), wan_pipelines.generate(pipe, kind, num_frames=9)]
    pipe.transformer.enable_adapters()
    made += [wan_pipelines.generate(pipe, kind), wan_pipelines.generate(pipe, kind, guidance_scale=1.0)]
    torch.save([each.cpu() for each in made], "frames.pt")
