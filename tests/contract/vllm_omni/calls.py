"""The tiny calls that the contract kit makes, one a feature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def tiny_vae() -> Any:
    """vLLM-Omni's distributed Wan VAE, tiled, in a job of one rank: it asks for no parallel decode."""
    import torch
    from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_wan import DistributedAutoencoderKLWan

    from tests.distributed.decoding.tiny import vae_config

    torch.manual_seed(0)
    vae = DistributedAutoencoderKLWan(**vae_config("2.1")).eval().requires_grad_(False)
    # What `init_distributed` makes, without its process group; 0.18 calls it a decoder.
    vae.distributed_executor = vae.distributed_decoder = SimpleNamespace(parallel_size=1, parallel_mode="tile")
    pixels = int(vae.config.scale_factor_spatial)
    vae.enable_tiling(4 * pixels, 4 * pixels, 3 * pixels, 3 * pixels)
    return vae


def decode() -> Any:
    """A latent (1, 4, 1, 6, 6) in four tiles and whole, by this process alone: handed back to vLLM-Omni."""
    import torch

    vae, latent = tiny_vae(), torch.ones(1, 4, 1, 6, 6)
    with torch.no_grad():
        tiles = vae.tiled_decode(latent, return_dict=False)
        vae.use_tiling = False
        return tiles, vae._decode(latent, return_dict=False)


def encode() -> Any:
    """A video (1, 3, 1, 48, 48) in four tiles and whole, by this process alone: handed back to vLLM-Omni."""
    import torch

    vae, video = tiny_vae(), torch.ones(1, 3, 1, 48, 48)
    with torch.no_grad():
        tiles = vae.tiled_encode(video)
        vae.use_tiling = False
        return tiles, vae._encode(video)


def wrapper() -> Any:
    """0.16's wrapper of a VAE, in a process that has no DiT group."""
    import torch
    from vllm_omni.diffusion.distributed.vae_patch_parallel import VaePatchParallelism

    from tests.distributed.decoding.tiny import make_vae

    def no_group() -> Any:
        raise RuntimeError("no group here")

    vae = make_vae("2.1", torch.float32)
    return VaePatchParallelism(vae, vae_patch_parallel_size=2, group_getter=no_group)


def decode_video() -> Any:
    """A latent (1, 4, 1, 2, 2) through the wrapper, handed back to vLLM-Omni."""
    import torch

    with torch.no_grad():
        return wrapper().decode(torch.ones(1, 4, 1, 2, 2), return_dict=False)
