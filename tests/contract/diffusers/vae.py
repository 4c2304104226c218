"""Tiny Wan and Qwen-Image VAEs of diffusers, as `tests.contract.decoding` wants them."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed.decoding.tiny import CHANNELS, LAYOUTS, QWEN_IMAGE, make_vae

__all__ = ["LATENT_CHANNELS", "decode", "encode", "make_vae"]
LATENT_CHANNELS = dict.fromkeys((*LAYOUTS, QWEN_IMAGE), CHANNELS)


def decode(vae: Any, latent: torch.Tensor, tiled: bool) -> torch.Tensor:
    _tile(vae, tiled)
    sample = vae.decode(latent).sample
    assert isinstance(sample, torch.Tensor)
    return sample


def encode(vae: Any, video: torch.Tensor, tiled: bool) -> torch.Tensor:
    _tile(vae, tiled)
    parameters = vae.encode(video).latent_dist.parameters
    assert isinstance(parameters, torch.Tensor)
    return parameters


def _tile(vae: Any, tiled: bool) -> None:
    pixels = int(vae.spatial_compression_ratio)
    vae.enable_tiling(4 * pixels, 4 * pixels, 3 * pixels, 3 * pixels)
    vae.use_tiling = tiled
