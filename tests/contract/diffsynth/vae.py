"""Tiny Wan and Qwen-Image VAEs of DiffSynth, as `tests.contract.decoding` wants them."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.contract.decoding import Case, images_and_videos

QWEN_IMAGE = "qwen_image"
LATENT_CHANNELS = {"2.1": 16, "2.2": 48, QWEN_IMAGE: 16}
# layout -> (class that users hold, class of its model, what makes that tiny)
SIZES: dict[str, tuple[str, str, dict[str, int]]] = {
    "2.1": ("WanVideoVAE", "VideoVAE_", {"dim": 8, "num_res_blocks": 1}),
    "2.2": ("WanVideoVAE38", "VideoVAE38_", {"dim": 8, "dec_dim": 12, "num_res_blocks": 1}),
}


def make_vae(layout: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    vae = _make_qwen_image() if layout == QWEN_IMAGE else _make_wan(layout)
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("proj.weight"):  # zero by default: the attention would do nothing
            torch.nn.init.normal_(parameter, std=0.1)
    return vae.eval().requires_grad_(False).to(dtype)


def _make_wan(layout: str) -> Any:
    from diffsynth.models import wan_video_vae

    whole, inner, sizes = SIZES[layout]
    tiny = partial(getattr(wan_video_vae, inner), **sizes)
    with patch.object(wan_video_vae, inner, lambda z_dim, **_: tiny(z_dim=z_dim)):  # full size it takes seconds
        return getattr(wan_video_vae, whole)()


def _make_qwen_image() -> Any:
    from diffsynth.models.qwen_image_vae import QwenImageVAE

    return QwenImageVAE(base_dim=8, num_res_blocks=1)


def make_qwen_image_2_1() -> Any:
    """Its convolutions are two-dimensional: another network."""
    module = pytest.importorskip("diffsynth.models.qwen_image_21_vae", reason="DiffSynth 2.1 brings it")
    return module.QwenImage21VAE.__new__(module.QwenImage21VAE)


def qwen_image_cases(verb: str) -> list[Case]:
    """Those that this release has a method for: of videos from 2.1.10 on, and of tiles."""
    from diffsynth.models.qwen_image_vae import QwenImageVAE

    videos, tiles = hasattr(QwenImageVAE, f"{verb}_video"), hasattr(QwenImageVAE, "tiled_forward")
    cases = images_and_videos(QWEN_IMAGE)
    return [case for case in cases if (videos or case.frames == 1) and (tiles or not case.tiled)]


def _is_wan(vae: Any) -> bool:
    return type(vae).__module__ == "diffsynth.models.wan_video_vae"


def decode(vae: Any, latent: torch.Tensor, tiled: bool) -> torch.Tensor:
    return _call(vae, "decode", latent, tiled)


def encode(vae: Any, video: torch.Tensor, tiled: bool) -> torch.Tensor:
    return _call(vae, "encode", video, tiled)


def _call(vae: Any, verb: str, given: torch.Tensor, tiled: bool) -> torch.Tensor:
    if not _is_wan(vae):
        return _call_qwen_image(vae, verb, given, tiled)
    result = getattr(vae, verb)(given, device="cpu", tiled=tiled, tile_size=(4, 4), tile_stride=(3, 3))
    assert isinstance(result, torch.Tensor)
    return result


def _call_qwen_image(vae: Any, verb: str, given: torch.Tensor, tiled: bool) -> torch.Tensor:
    """An image without the dimension of frames, as Qwen-Image's pipelines do; a video as LingBot-Video's does."""
    if given.shape[2] > 1:
        result = getattr(vae, f"{verb}_video")(given)
    else:
        result = getattr(vae, verb)(given.squeeze(2), tiled=tiled, tile_size=4, tile_stride=3).unsqueeze(2)
    assert isinstance(result, torch.Tensor)
    return result
