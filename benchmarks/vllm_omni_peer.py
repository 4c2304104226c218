"""vLLM-Omni's Wan decoders as arms of `vae_decode.py`, on the group of the benchmark instead of a served engine's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm_omni.diffusion.distributed.autoencoders import distributed_vae_executor
from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_wan import (
    DistributedAutoencoderKLWan,
    OmniAutoencoderKLWan,
)
from vllm_omni.diffusion.distributed.autoencoders.wan_vae_fastpath import install_wan_vae_fastpath

# arm: does it run on one GPU (or on several)
ARMS = {
    "vLLM-Omni 0.30 fast path, lossless": True,
    "vLLM-Omni 0.30 fast path, channels_last": True,
    "vLLM-Omni 0.30 tile executor": False,
    "vLLM-Omni 0.30 spatial shard, height": False,
    "vLLM-Omni 0.30 spatial shard, width": False,
}


def make(arm: str, config: dict[str, Any], device: torch.device, dtype: torch.dtype, group: Any, ranks: int) -> Any:
    """A VAE of vLLM-Omni with the weights the benchmark's other arms have, set up for `arm`."""
    torch.manual_seed(0)
    kind = OmniAutoencoderKLWan if ranks == 1 else DistributedAutoencoderKLWan
    with torch.device(device):
        vae = kind(**config).eval().requires_grad_(False).to(dtype)
    if ranks == 1:
        report = install_wan_vae_fastpath(vae, level=arm.rsplit(" ", 1)[1])
        if not report.installed:
            raise RuntimeError(f"vLLM-Omni's fast path did not install: {report.reason}")
        return vae
    distributed_vae_executor.get_world_group = lambda: SimpleNamespace(device_group=group)
    vae.init_distributed()
    mode = "tile" if "tile" in arm else "spatial_shard_" + arm.rsplit(" ", 1)[1]
    vae.set_parallel_size(ranks, mode=mode)
    vae.enable_tiling()
    return vae
