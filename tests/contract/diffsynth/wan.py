"""Tiny Wan models of the installed DiffSynth, with their inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffsynth.models.wan_video_dit import WanModel
from diffsynth.pipelines.wan_video import model_fn_wan_video
from peft import LoraConfig, inject_adapter_in_model

from tests.contract.diffsynth import steps
from tests.contract.diffsynth.copies import built_once

TARGETS = ["q", "k", "v", "o", "ffn.0", "ffn.2"]
FULL_SIZE = {"dim": 5120, "ffn_dim": 13824, "text_dim": 4096, "freq_dim": 256, "num_heads": 40, "num_layers": 40}
TINY = {"dim": 48, "ffn_dim": 64, "text_dim": 32, "freq_dim": 16, "num_heads": 2, "num_layers": 4}


def wan_model(kind: str, sizes: dict[str, int] | None = None, **kwargs: Any) -> WanModel:
    """`kind` is t2v or i2v."""
    image = kind == "i2v"
    return WanModel(
        in_dim=36 if image else 16,
        out_dim=16,
        eps=1e-6,
        patch_size=(1, 2, 2),
        has_image_input=image,
        **(sizes or TINY),
        **kwargs,
    )


@built_once
def lora_model(
    kind: str = "t2v",
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    layers: int = TINY["num_layers"],
    heads: int = TINY["num_heads"],
) -> WanModel:
    """A frozen tiny DiT with LoRA whose B matrices are not zero, so that every gradient is real."""
    torch.manual_seed(seed)
    model = wan_model(kind, {**TINY, "num_layers": layers, "num_heads": heads}).requires_grad_(False)
    model = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(device=device, dtype=dtype)


def inputs(
    kind: str = "t2v", seed: int = 1, batch: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Latents (b, 16, 3, 8, 8), timestep (b,), context (b, 5, 32), and for i2v the image's y and CLIP feature."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        "latents": torch.randn((batch, 16, 3, 8, 8), generator=generator),
        "timestep": torch.full((batch,), 500.0),
        "context": torch.randn((batch, 5, 32), generator=generator),
    }
    if kind == "i2v":
        made["y"] = torch.randn((batch, 20, 3, 8, 8), generator=generator)
        made["clip_feature"] = torch.randn((batch, 257, 1280), generator=generator)
    return {name: tensor.to(device, dtype) for name, tensor in made.items()}


def train_step(model: WanModel, kind: str, device: str, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Two losses and every LoRA gradient, on the host."""
    forward = partial(model_fn_wan_video, **options)
    return steps.train_step(model, forward, lambda seed: inputs(kind, seed, device=device, dtype=dtype))
