"""A service of a user: each request has a LoRA that is swapped in place and a scale for its forwards, and a thread
decodes the last video while the next one is denoised. With the argument `spawn` it generates in a process of its own.
Writes frames.pt."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict

from tests.contract.diffusers import wan_pipelines


def lora(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = wan_pipelines.wan().transformer
    model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=False))
    return {f"transformer.{name}": value for name, value in get_peft_model_state_dict(model).items()}


def made(requests: int) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    loras = [lora(seed) for seed in range(requests)]
    pipe = wan_pipelines.wan()
    pipe.enable_lora_hotswap(target_rank=4)

    def decode(latents: torch.Tensor) -> Any:
        with torch.no_grad():
            return pipe.vae.decode(latents, return_dict=False)[0]

    with ThreadPoolExecutor(1) as pool:
        decoded = []
        for number, state in enumerate(loras):
            pipe.load_lora_weights(state, adapter_name="a", hotswap=number > 0)
            for _ in range(2):
                latents = wan_pipelines.generate(
                    pipe, "wan", num_inference_steps=6, output_type="latent", attention_kwargs={"scale": 0.5}
                )
                decoded.append(pool.submit(decode, latents))
        return [each.result() for each in decoded]


if __name__ == "__main__":
    if sys.argv[1:] == ["spawn"]:
        with multiprocessing.get_context("spawn").Pool(1) as processes:  # which it ends without a word
            found = processes.apply(made, (1,))
    else:
        found = made(2)
    torch.save(found, "frames.pt")
