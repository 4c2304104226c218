"""Tiny Wan VAEs of DiffSynth, as `tests.contract.decoding` wants them."""

from __future__ import annotations

from typing import Any

import torch

LATENT_CHANNELS = {"2.1": 16, "2.2": 48}


def make_vae(layout: str, dtype: torch.dtype) -> Any:
    from diffsynth.models.wan_video_vae import VideoVAE38_, VideoVAE_, WanVideoVAE, WanVideoVAE38

    torch.manual_seed(0)
    if layout == "2.1":
        vae = WanVideoVAE()
        vae.model = VideoVAE_(dim=8, z_dim=16, num_res_blocks=1)
    else:
        vae = WanVideoVAE38()
        vae.model = VideoVAE38_(dim=8, dec_dim=12, z_dim=48, num_res_blocks=1)
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("proj.weight"):  # zero by default: the attention would do nothing
            torch.nn.init.normal_(parameter, std=0.1)
    return vae.eval().requires_grad_(False).to(dtype)


def decode(vae: Any, latent: torch.Tensor, tiled: bool) -> torch.Tensor:
    frames = vae.decode(latent, device="cpu", tiled=tiled, tile_size=(4, 4), tile_stride=(3, 3))
    assert isinstance(frames, torch.Tensor)
    return frames
