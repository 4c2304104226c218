"""vLLM-Omni's `DistributedAutoencoderKLWan`, its parents, and its Qwen-Image VAEs, bound to the core.

Wan's are diffusers' decoder with vLLM-Omni's norm in it, and from 0.30 an autocast around it. Qwen-Image's are
diffusers' too; the layered one is a copy, whose images have four channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, DecoderGraph


def build(vae: Any) -> Binding:
    """Bind the core to `vae._decode`, in place of the tile executor and the spatial shard behind it.

    Raises:
        VaeInvalid: the decoder is not built as the releases this adapter knows build it, or vLLM-Omni's spatial
            shard has replaced its convolutions already.
    """
    from wanshim.core.decoding import Binding
    from wanshim.errors import VaeInvalid

    if getattr(vae, "_vllm_omni_wan_spatial_shard_installed", False):
        raise VaeInvalid(
            "vLLM-Omni's spatial shard has rebuilt this decoder",
            expected="a decoder as it was loaded",
            hint="Use --vae-parallel-mode tile, or leave the decode to vLLM-Omni",
        )
    graph = read(vae)
    replace = partial(_replace, vae)
    return Binding(graph=graph, target=vae, methods={"_decode": replace}, entry="decode")


def read(vae: Any) -> DecoderGraph:
    from wanshim.core.decoding import read_graph

    return read_graph(vae, own=lambda vae, z: untiled(vae, vae._decode, z, return_dict=False)[0])


def untiled(vae: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `method` returns for whole pictures; the executor of tiles takes none of it."""
    tiling, vae.use_tiling = vae.use_tiling, False
    try:
        return method(*args, **kwargs)
    finally:
        vae.use_tiling = tiling
        vae.clear_cache()


def wrap_output(sample: torch.Tensor, return_dict: bool) -> Any:
    """What `decode` returns."""
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample) if return_dict else (sample,)


def _replace(vae: Any, decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    from wanshim.core.decoding import TileSettings

    def _decode(z: torch.Tensor, return_dict: bool = True) -> Any:
        sample = decode(z, tiles=TileSettings.of(vae), lean=bool(vae.use_tiling))
        sample = z.new_empty(0) if sample is None else sample
        return wrap_output(sample, return_dict)

    return _decode


_SHARED = "vllm_omni.diffusion.distributed.autoencoders"
CLASSES = (
    f"{_SHARED}.autoencoder_kl_wan.DistributedAutoencoderKLWan",
    f"{_SHARED}.autoencoder_kl_wan.OmniAutoencoderKLWan",
    f"{_SHARED}.autoencoder_kl_qwenimage.DistributedAutoencoderKLQwenImage",
    "vllm_omni.diffusion.models.qwen_image.autoencoder_kl_qwenimage.AutoencoderKLQwenImage",
)
BUILDERS = dict.fromkeys(CLASSES, build)
