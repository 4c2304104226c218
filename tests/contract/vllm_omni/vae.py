"""Tiny distributed VAEs of vLLM-Omni, their executor on the test's group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.decoding.tiny import QWEN_IMAGE, tiny, vae_config


def make_distributed(layout: str, size: int, dtype: torch.dtype = torch.float32) -> Any:
    """vLLM-Omni's VAE as `initialize_model` sets it up, which tiles what is larger than 4 x 4 latents."""
    from vllm_omni.diffusion.distributed.autoencoders import distributed_vae_executor

    for name in ("get_world_group", "get_dit_group"):
        if hasattr(distributed_vae_executor, name):
            group: Any = dist.group.WORLD
            group = SimpleNamespace(device_group=group, cpu_group=group) if name == "get_world_group" else group
            setattr(distributed_vae_executor, name, lambda group=group: group)
    vae = tiny(_class(layout), vae_config(layout), dtype)
    vae.init_distributed()
    vae.set_parallel_size(size)
    pixels = int(vae.spatial_compression_ratio)
    vae.enable_tiling(4 * pixels, 4 * pixels, 3 * pixels, 3 * pixels)
    return vae


def _class(layout: str) -> Any:
    from vllm_omni.diffusion.distributed.autoencoders import autoencoder_kl_qwenimage, autoencoder_kl_wan

    if layout == QWEN_IMAGE:
        return autoencoder_kl_qwenimage.DistributedAutoencoderKLQwenImage
    return autoencoder_kl_wan.DistributedAutoencoderKLWan
