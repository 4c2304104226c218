"""Decoder graphs of the real sizes without weights, and tiny ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.distributed.decoding.tiny import make_vae
from wanshim.core.decoding import read_graph
from wanshim.core.decoding.model.graph import DecoderGraph

LATENTS = {"2.1": (1, 16, 21, 88, 160), "2.2": (1, 48, 31, 44, 80)}


@cache
def full(layout: str) -> DecoderGraph:
    """The graph of the released VAE's size, on the meta device."""
    with torch.device("meta"):
        return read_graph(released(layout))


def released(layout: str) -> Any:
    """The VAE of the released size, on the device that is set."""
    from diffusers import AutoencoderKLWan

    extra = {}
    if layout == "2.2":
        extra = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2}
        extra |= {"in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
        extra |= {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
    return AutoencoderKLWan(**extra)


@cache
def tiny(layout: str) -> DecoderGraph:
    return read_graph(make_vae(layout))
