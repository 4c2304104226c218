"""`diffusers.vae_decode`: every rank of a torchrun job decodes its share of a Wan video.

`AutoencoderKLWan._decode` goes to the decode room when several ranks hold the same latent. WANSHIM_VAE_MODE picks the
mode; WANSHIM_VAE_FAST=1 trades bit-identity for the fast operators. A VAE that asked for tiling gets the exact plan
with the least memory. Whatever cannot be shared stays with diffusers, and the report says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.core.vae_method import replace_method
from wanshim.patching import Feature, Seam

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import VaeCache

MODULE = "diffusers.models.autoencoders.autoencoder_kl_wan"
# What the decode room computes in their place; they must be the code it knows.
DECODER = (
    "AutoencoderKLWan.decode",
    "WanDecoder3d.forward",
    "WanMidBlock.forward",
    "WanUpBlock.forward",
    "WanResidualUpBlock.forward",
    "WanResidualBlock.forward",
    "WanAttentionBlock.forward",
    "WanResample.forward",
    "WanUpsample.forward",
    "WanCausalConv3d.forward",
    "WanRMS_norm.forward",
    "DupUp3D.forward",
    "unpatchify",
)


def _answer(sample: torch.Tensor, return_dict: bool) -> Any:
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample) if return_dict else (sample,)


def _decode(cache: VaeCache, vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
    from wanshim.core.decoding import TileSettings, VaeFallback, chosen_options

    from .decoder_graph import taken

    read = settings.read()
    options = chosen_options(read.vae_mode, read.vae_fast)
    reason = taken(vae)
    if reason is None and not type(vae).__module__.startswith("diffusers."):
        reason = f"{type(vae).__module__}.{type(vae).__qualname__} brings a decode of its own"
    if reason is not None:
        raise VaeFallback(reason)
    return _answer(cache.run(vae, z, options, tiles=TileSettings.of(vae), lean=bool(vae.use_tiling)), return_dict)


FEATURE = Feature(
    name="diffusers.vae_decode",
    summary="Wan VAE decode shared by all ranks of a torchrun job",
    switched_on_by="vae_mode",
    relies_on=tuple(f"{MODULE}:{name}" for name in DECODER),
    seams=(
        Seam(
            f"{MODULE}:AutoencoderKLWan._decode",
            replace_method("diffusers.vae_decode", _decode),
            in_graph=True,
            why="context parallelism covers transformers only: every rank decodes the whole video",
            upstream="https://github.com/huggingface/diffusers (no parallel VAE as of 0.42.1)",
            remove_when="diffusers splits AutoencoderKLWan.decode over ranks without changing its output",
        ),
    ),
)
