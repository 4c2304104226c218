"""FLUX.2's DiT of the installed DiffSynth, tiny or at full size, with its inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffsynth.models.flux2_dit import Flux2DiT
from diffsynth.pipelines.flux2_image import model_fn_flux2
from peft import LoraConfig, inject_adapter_in_model

from tests.contract.diffsynth import steps
from tests.contract.diffsynth.copies import built_once

TINY = {
    "in_channels": 8,
    "num_layers": 3,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
FULL: dict[str, Any] = {}  # FLUX.2-dev: 8 double and 48 single blocks, dim 6144
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "to_add_out", "linear_in", "linear_out", "to_qkv_mlp_proj"]


@built_once
def lora_model(seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Flux2DiT:
    """A frozen tiny DiT with LoRA in double and single blocks, all of it in use."""
    torch.manual_seed(seed)
    model = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS), tiny())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(device=device, dtype=dtype)


def tiny() -> Flux2DiT:
    return Flux2DiT(**TINY)


def inputs(seed: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Latents (1, 12, 8) of a 3 x 4 image, five tokens of text, and the positions of both."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        "latents": torch.randn((1, 12, 8), generator=generator).to(dtype),
        "timestep": torch.full((1,), 500.0 - seed).to(dtype),
        "prompt_embeds": torch.randn((1, 5, 24), generator=generator).to(dtype),
        "text_ids": torch.cartesian_prod(*map(torch.arange, (1, 1, 1, 5)))[None],
        "image_ids": torch.cartesian_prod(*map(torch.arange, (1, 3, 4, 1)))[None],
    }
    return {"embedded_guidance": 1.0, **{name: tensor.to(device) for name, tensor in made.items()}}


def train_step(model: Flux2DiT, device: str, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Two losses and every gradient, on the host. The last double block's text stream goes on into the single
    blocks, so every gradient is real."""
    forward = partial(model_fn_flux2, **options)
    return steps.train_step(model, forward, lambda seed: inputs(seed, device, dtype))
