"""Tiny Wan VAEs of DiffSynth, as `tests.contract.decoding` wants them."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch

LATENT_CHANNELS = {"2.1": 16, "2.2": 48}
# layout -> (class that users hold, class of its model, what makes that tiny)
SIZES: dict[str, tuple[str, str, dict[str, int]]] = {
    "2.1": ("WanVideoVAE", "VideoVAE_", {"dim": 8, "num_res_blocks": 1}),
    "2.2": ("WanVideoVAE38", "VideoVAE38_", {"dim": 8, "dec_dim": 12, "num_res_blocks": 1}),
}


def make_vae(layout: str, dtype: torch.dtype) -> Any:
    from diffsynth.models import wan_video_vae

    whole, inner, sizes = SIZES[layout]
    tiny = partial(getattr(wan_video_vae, inner), **sizes)
    torch.manual_seed(0)
    with patch.object(wan_video_vae, inner, lambda z_dim, **_: tiny(z_dim=z_dim)):  # full size it takes seconds
        vae = getattr(wan_video_vae, whole)()
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


def encode(vae: Any, video: torch.Tensor, tiled: bool) -> torch.Tensor:
    latents = vae.encode(video, device="cpu", tiled=tiled, tile_size=(4, 4), tile_stride=(3, 3))
    assert isinstance(latents, torch.Tensor)
    return latents
