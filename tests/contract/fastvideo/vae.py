"""Tiny VAEs of FastVideo, Wan's and its forks, as `tests.contract.decoding` wants them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

COSMOS, LINGBOT = "cosmos_2.5", "lingbot_world"
FORKS = (COSMOS, LINGBOT)
LATENT_CHANNELS = {"2.1": 4, "2.2": 4, COSMOS: 16, LINGBOT: 16}


def make_vae(layout: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    vae = {COSMOS: _make_cosmos, LINGBOT: _make_lingbot}.get(layout, partial(_make_wan, layout))(dtype)
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("proj.weight"):  # zero by default in the forks: the attention would do nothing
            torch.nn.init.normal_(parameter, std=0.1)
    return vae.eval().requires_grad_(False).to(dtype)


def expect_fork(layout: str) -> None:
    """Skip the test if this release lacks the fork."""
    module = {COSMOS: "cosmos25wanvae", LINGBOT: "lingbotworld2_wanvae"}[layout]
    pytest.importorskip(f"fastvideo.models.vaes.{module}", reason="a later FastVideo brings it")


def _make_cosmos(dtype: torch.dtype) -> Any:
    from fastvideo.models.vaes import cosmos25wanvae as module

    with (  # its widths are fixed, and full size takes seconds
        patch.object(module, "Cosmos25Encoder3d", _narrow(module.Cosmos25Encoder3d)),
        patch.object(module, "Cosmos25Decoder3d", _narrow(module.Cosmos25Decoder3d)),
    ):
        return module.Cosmos25WanVAE(dtype=dtype)


def _make_lingbot(dtype: torch.dtype) -> Any:
    from fastvideo.models.vaes import lingbotworld2_wanvae as module

    config = SimpleNamespace(z_dim=16, latents_mean=[0.1 * i for i in range(16)], latents_std=[1.5] * 16)
    with patch.object(module, "WanVAE_", _narrow(module.WanVAE_)):
        return module.LingBotWorld2WanVAE(config, dtype=dtype)


def _narrow(cls: Any) -> Any:
    return lambda **sizes: cls(**{**sizes, "dim": 8, "num_res_blocks": 1})


def _make_wan(layout: str, dtype: torch.dtype) -> Any:
    from fastvideo.configs.models.vaes.wanvae import WanVAEArchConfig, WanVAEConfig
    from fastvideo.models.vaes.wanvae import AutoencoderKLWan

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
    return AutoencoderKLWan(WanVAEConfig(arch_config=arch))


def decode(vae: Any, latent: torch.Tensor, tiled: bool) -> torch.Tensor:
    vae.use_tiling = tiled
    frames = vae.decode(latent)
    assert isinstance(frames, torch.Tensor)
    return frames


def encode(vae: Any, video: torch.Tensor, tiled: bool) -> torch.Tensor:
    vae.use_tiling = tiled
    encoded = vae.encode(video)
    parameters = encoded.parameters if hasattr(encoded, "parameters") else encoded.mean
    assert isinstance(parameters, torch.Tensor)
    return parameters
