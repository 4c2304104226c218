"""`diffusers.vae_encode`: every rank of a torchrun job encodes its share of a video or image.

The `_encode` of `AutoencoderKLWan` and `AutoencoderKLQwenImage` goes to the decode room when several ranks hold the
same input (image to video, video to video, editing). WANSHIM_VAE_ENCODE picks the mode; WANSHIM_VAE_FAST=1 trades
bit-identity for the fast operators. A VAE with tiling on gets the exact plan with the least memory. Ranks that hold
different videos, as in data-parallel training, each encode their own with diffusers, and the report says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import Run, replace_method

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import EncoderGraph

MODULES = "diffusers.models.autoencoders"
WAN = f"{MODULES}.autoencoder_kl_wan"
QWEN_IMAGE = f"{MODULES}.autoencoder_kl_qwenimage"
# The code that the decode room computes instead: a release in which it differs is not patched.
ENCODER = (
    f"{WAN}:AutoencoderKLWan.encode",
    f"{WAN}:WanEncoder3d.forward",
    f"{WAN}:WanResidualDownBlock.forward",
    f"{WAN}:WanMidBlock.forward",
    f"{WAN}:WanResidualBlock.forward",
    f"{WAN}:WanAttentionBlock.forward",
    f"{WAN}:WanResample.forward",
    f"{WAN}:WanCausalConv3d.forward",
    f"{WAN}:WanRMS_norm.forward",
    f"{WAN}:AvgDown3D.forward",
    f"{WAN}:patchify",
    f"{QWEN_IMAGE}:AutoencoderKLQwenImage.encode",
    f"{QWEN_IMAGE}:QwenImageEncoder3d.forward",
    f"{QWEN_IMAGE}:QwenImageMidBlock.forward",
    f"{QWEN_IMAGE}:QwenImageResidualBlock.forward",
    f"{QWEN_IMAGE}:QwenImageAttentionBlock.forward",
    f"{QWEN_IMAGE}:QwenImageResample.forward",
    f"{QWEN_IMAGE}:QwenImageCausalConv3d.forward",
    f"{QWEN_IMAGE}:QwenImageRMS_norm.forward",
)


def _read(vae: Any) -> EncoderGraph:
    from .encoder_graph import read

    return read(vae)


def _encode(run: Run, vae: Any, x: torch.Tensor) -> Any:
    from .decoder_graph import leave_if_taken

    leave_if_taken(vae, "encode")
    return run(vae, x, lean=bool(vae.use_tiling))


def _seam(target: str, *, required: bool) -> Seam:
    return Seam(
        target,
        replace_method(_encode, _read, verb="encode"),
        in_graph=True,
        required=required,
        why="context parallelism covers transformers only: every rank encodes the whole video or image",
        upstream="https://github.com/huggingface/diffusers (no parallel VAE as of 0.42.1)",
        remove_when="diffusers splits this VAE's encode over ranks without changing its output",
    )


FEATURE = Feature(
    name="diffusers.vae_encode",
    summary="Wan and Qwen-Image VAE encode shared by all ranks of a torchrun job",
    switched_on_by="vae_encode",
    relies_on=ENCODER,
    seams=(
        _seam(f"{WAN}:AutoencoderKLWan._encode", required=True),
        _seam(f"{QWEN_IMAGE}:AutoencoderKLQwenImage._encode", required=False),  # diffusers 0.35 and later
    ),
)
