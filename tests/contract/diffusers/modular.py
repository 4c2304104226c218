"""A script with a modular pipeline of Wan: two sizes. Writes frames.pt."""

from __future__ import annotations

import sys
from typing import Any

import torch
from diffusers.modular_pipelines.wan import modular_blocks_wan, modular_blocks_wan22
from diffusers.schedulers import UniPCMultistepScheduler

from tests.contract.diffusers import wan_pipelines

BLOCKS = {"wan": modular_blocks_wan.WanBlocks, "wan22": modular_blocks_wan22.Wan22Blocks}


def made(kind: str) -> Any:
    models = getattr(wan_pipelines, kind)()
    blocks = BLOCKS[kind]()
    blocks.sub_blocks.pop("text_encoder")
    pipe = blocks.init_pipeline()
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    second = {} if models.transformer_2 is None else {"transformer_2": models.transformer_2}
    pipe.update_components(transformer=models.transformer, vae=models.vae, scheduler=scheduler, **second)
    return pipe


def generate(pipe: Any, **changed: Any) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(1)
    prompt, negative = (torch.randn(1, 8, wan_pipelines.TEXT, generator=seeded) for _ in range(2))
    given = {
        "prompt_embeds": prompt,
        "negative_prompt_embeds": negative,
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 3,
        "generator": torch.Generator().manual_seed(2),
        "output_type": "pt",
        "output": "videos",
        **changed,
    }
    frames: torch.Tensor = pipe(**given)
    return frames


if __name__ == "__main__":
    pipe = made(sys.argv[1])
    torch.save([generate(pipe).cpu(), generate(pipe, num_frames=9).cpu()], "frames.pt")
