"""Tiny random Wan and Qwen-Image VAEs of diffusers, with every kind of layer the full ones have."""

from __future__ import annotations

import logging
from typing import Any

import torch

LAYOUTS = ("2.1", "2.2")
QWEN_IMAGE = "qwen_image"  # the 2.1 layout under other names
CHANNELS = 4


def vae_config(layout: str) -> dict[str, Any]:
    """The stages of the real VAE (two temporal upsamplers of three), few channels."""
    config: dict[str, Any] = {
        "base_dim": 8,
        "z_dim": CHANNELS,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * CHANNELS,
        "latents_std": [1.0] * CHANNELS,
    }
    if layout == "2.2":
        config |= {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
        config |= {"decoder_base_dim": 12, "scale_factor_spatial": 16}
    return config


def make_vae(layout: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A VAE of diffusers: `layout` is one of LAYOUTS or QWEN_IMAGE."""
    import diffusers

    cls = diffusers.AutoencoderKLQwenImage if layout == QWEN_IMAGE else diffusers.AutoencoderKLWan
    return tiny(cls, vae_config(layout), dtype, seed)


def tiny(cls: Any, config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A VAE of `cls` with random weights and uneven norms."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    vae = cls(**config)
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


def make_video(
    frames: int, height: int = 80, width: int = 112, batch: int = 1, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The same video in every process."""
    generator = torch.Generator().manual_seed(frames * 100 + height * 10 + width)
    return torch.rand(batch, 3, frames, height, width, generator=generator).mul(2).sub(1).to(dtype)


def encode(vae: Any, video: torch.Tensor) -> torch.Tensor:
    """Mean and logarithm of the variance."""
    parameters = vae.encode(video).latent_dist.parameters
    assert isinstance(parameters, torch.Tensor)
    return parameters
