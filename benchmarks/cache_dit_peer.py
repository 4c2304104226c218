"""cache-dit's parallel tiles as an arm of `vae_decode.py`: tile n goes to rank n % ranks, the result to every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from cache_dit.distributed.autoencoders.autoencoder_kl_wan import AutoencoderKLWanDataParallelismPlanner
from diffusers import AutoencoderKLWan

# arm: does it run on one GPU (or on several)
ARMS = {"cache-dit 1.5.3 tiles": False}


def make(arm: str, config: dict[str, Any], device: torch.device, dtype: torch.dtype, group: Any, ranks: int) -> Any:
    """diffusers' VAE with the weights of the benchmark's other arms and cache-dit's tiles on the benchmark's group."""
    torch.manual_seed(0)
    with torch.device(device):
        vae = AutoencoderKLWan(**config).eval().requires_grad_(False).to(dtype)
    mesh: Any = SimpleNamespace(get_group=lambda: group)
    AutoencoderKLWanDataParallelismPlanner().parallelize_tiling(vae, mesh)
    return vae
