"""Tiny random Wan VAEs of diffusers, both layouts, with every kind of layer the full ones have."""

from __future__ import annotations

import logging
from typing import Any

import torch

LAYOUTS = ("2.1", "2.2")
CHANNELS = 4


def make_vae(layout: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A VAE with the stages of the real one (two temporal upsamplers of three) and few channels."""
    from diffusers import AutoencoderKLWan

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    extra: dict[str, Any] = {}
    if layout == "2.2":
        extra = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
        extra |= {"decoder_base_dim": 12, "scale_factor_spatial": 16}
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        **extra,
    )
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return vae.eval().requires_grad_(False).to(dtype)


def make_latent(
    frames: int, height: int = 5, width: int = 7, batch: int = 1, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The same latent in every process."""
    generator = torch.Generator().manual_seed(frames * 100 + height * 10 + width)
    return torch.randn(batch, CHANNELS, frames, height, width, generator=generator).to(dtype)
