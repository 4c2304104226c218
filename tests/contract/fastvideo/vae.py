"""Tiny Wan VAEs of FastVideo, as `tests.contract.decoding` wants them."""

from __future__ import annotations

from typing import Any

import torch

LATENT_CHANNELS = {"2.1": 4, "2.2": 4}


def make_vae(layout: str, dtype: torch.dtype) -> Any:
    from fastvideo.configs.models.vaes.wanvae import WanVAEArchConfig, WanVAEConfig
    from fastvideo.models.vaes.wanvae import AutoencoderKLWan

    torch.manual_seed(0)
    extra: dict[str, Any] = {}
    if layout == "2.2":
        extra = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
        extra |= {"decoder_base_dim": 12, "scale_factor_spatial": 16}
    arch = WanVAEArchConfig(
        base_dim=8,
        z_dim=4,
        dim_mult=(1, 2, 4, 4),
        num_res_blocks=1,
        temperal_downsample=(False, True, True),
        latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
        **extra,
    )
    vae = AutoencoderKLWan(WanVAEConfig(arch_config=arch))
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return vae.eval().requires_grad_(False).to(dtype)


def decode(vae: Any, latent: torch.Tensor, tiled: bool) -> torch.Tensor:
    vae.use_tiling = tiled
    frames = vae.decode(latent)
    assert isinstance(frames, torch.Tensor)
    return frames


def encode(vae: Any, video: torch.Tensor, tiled: bool) -> torch.Tensor:
    vae.use_tiling = tiled
    parameters = vae.encode(video).parameters
    assert isinstance(parameters, torch.Tensor)
    return parameters
