"""`diffusers.vae_encode`: every rank of a torchrun job encodes its share of a video for the Wan VAE.

`AutoencoderKLWan._encode` goes to the decode room when several ranks hold the same video (image to video, video to
video, editing). WANSHIM_VAE_ENCODE picks the mode; WANSHIM_VAE_FAST=1 trades bit-identity for the fast operators. A VAE
that asked for tiling gets the exact plan with the least memory. Ranks that hold different videos, as in data-parallel
training, encode each its own with diffusers, and the report says so.
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
ENCODER = (
    "AutoencoderKLWan.encode",
    "WanEncoder3d.forward",
    "WanResidualDownBlock.forward",
    "WanMidBlock.forward",
    "WanResidualBlock.forward",
    "WanAttentionBlock.forward",
    "WanResample.forward",
    "WanCausalConv3d.forward",
    "WanRMS_norm.forward",
    "AvgDown3D.forward",
    "patchify",
)


def _encode(cache: VaeCache, vae: Any, x: torch.Tensor) -> Any:
    from wanshim.core.decoding import VaeFallback, chosen_options

    from .decoder_graph import taken

    read = settings.read()
    options = chosen_options(read.vae_encode, read.vae_fast, verb="encode")
    reason = taken(vae, "encode")
    if reason is None and not type(vae).__module__.startswith("diffusers."):
        reason = f"{type(vae).__module__}.{type(vae).__qualname__} brings an encode of its own"
    if reason is not None:
        raise VaeFallback(reason)
    return cache.run(vae, x, options, lean=bool(vae.use_tiling))


FEATURE = Feature(
    name="diffusers.vae_encode",
    summary="Wan VAE encode shared by all ranks of a torchrun job",
    switched_on_by="vae_encode",
    relies_on=tuple(f"{MODULE}:{name}" for name in ENCODER),
    seams=(
        Seam(
            f"{MODULE}:AutoencoderKLWan._encode",
            replace_method("diffusers.vae_encode", _encode, verb="encode"),
            in_graph=True,
            why="context parallelism covers transformers only: every rank encodes the whole video",
            upstream="https://github.com/huggingface/diffusers (no parallel VAE as of 0.42.1)",
            remove_when="diffusers splits AutoencoderKLWan.encode over ranks without changing its output",
        ),
    ),
)
