"""`vllm_omni.vae_decode`: the exact decode in place of vLLM-Omni's tile executor, on its group and at its size.

From 0.18 on vLLM-Omni decodes Wan's tiles in parallel: seams blended, a third more work than one GPU untiled does.
Named explicitly, this feature sends `DistributedAutoencoderKLWan.tiled_decode` to the decode room instead. Like the
executor it gives frames to the first rank only. vLLM-Omni's spatial shard, where it is chosen, is left alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.core.vae_method import replace_method
from wanshim.patching import Feature, Seam

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import VaeCache

MODULE = "vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_wan"
EXECUTOR = "vllm_omni.diffusion.distributed.autoencoders.distributed_vae_executor"


def _answer(sample: torch.Tensor, return_dict: bool) -> Any:
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample) if return_dict else (sample,)


def _decode(cache: VaeCache, vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
    from wanshim.core.decoding import OutputSpec, TileSettings, VaeFallback, chosen_options

    read = settings.read()
    options = chosen_options(read.vae_mode, read.vae_fast)
    if not vae.is_distributed_enabled():
        raise VaeFallback("vae_patch_parallel_size asks for no parallel decode")
    executor = getattr(vae, "distributed_executor", None) or vae.distributed_decoder
    mode = getattr(executor, "parallel_mode", "tile")
    if mode != "tile":
        raise VaeFallback(f"vLLM-Omni's own {mode} is chosen")
    options = replace(options, active=int(executor.parallel_size), output=OutputSpec(ranks=(0,)))
    return _answer(cache.run(vae, z, options, group=executor.group, tiles=TileSettings.of(vae), lean=True), return_dict)


FEATURE = Feature(
    name="vllm_omni.vae_decode",
    summary="the exact parallel Wan decode in place of vLLM-Omni's tiles",
    relies_on=(f"{EXECUTOR}:DistributedVaeMixin.is_distributed_enabled", f"{EXECUTOR}:DistributedVaeExecutor.__init__"),
    seams=(
        Seam(
            f"{MODULE}:DistributedAutoencoderKLWan.tiled_decode",
            replace_method("vllm_omni.vae_decode", _decode),
            closure_because="a user who compiles the VAE's decode reaches it",
            why="tiles are decoded apart: they blend over seams and repeat 1.65 times the work",
            upstream="https://github.com/vllm-project/vllm-omni/pull/1366",
            remove_when="vLLM-Omni's default decode of Wan is exact and its fast path combines with sharding",
        ),
    ),
)
