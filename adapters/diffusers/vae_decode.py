"""`diffusers.vae_decode`: every rank of a torchrun job decodes its share of a video or image.

The `_decode` of `AutoencoderKLWan` and `AutoencoderKLQwenImage` goes to the decode room when several ranks hold the
same latent. WANSHIM_VAE_MODE picks the mode; WANSHIM_VAE_FAST=1 trades bit-identity for the fast operators. An image
has one latent frame, which only `spatial` shares. A VAE with tiling on gets the exact plan with the least memory.
Whatever cannot be shared stays with diffusers, and the report says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import Run, replace_method

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import DecoderGraph

MODULES = "diffusers.models.autoencoders"
WAN = f"{MODULES}.autoencoder_kl_wan"
QWEN_IMAGE = f"{MODULES}.autoencoder_kl_qwenimage"
# The code that the decode room computes instead: a release in which it differs is not patched.
DECODER = (
    f"{WAN}:AutoencoderKLWan.decode",
    f"{WAN}:WanDecoder3d.forward",
    f"{WAN}:WanMidBlock.forward",
    f"{WAN}:WanUpBlock.forward",
    f"{WAN}:WanResidualUpBlock.forward",
    f"{WAN}:WanResidualBlock.forward",
    f"{WAN}:WanAttentionBlock.forward",
    f"{WAN}:WanResample.forward",
    f"{WAN}:WanUpsample.forward",
    f"{WAN}:WanCausalConv3d.forward",
    f"{WAN}:WanRMS_norm.forward",
    f"{WAN}:DupUp3D.forward",
    f"{WAN}:unpatchify",
    f"{QWEN_IMAGE}:AutoencoderKLQwenImage.decode",
    f"{QWEN_IMAGE}:QwenImageDecoder3d.forward",
    f"{QWEN_IMAGE}:QwenImageMidBlock.forward",
    f"{QWEN_IMAGE}:QwenImageUpBlock.forward",
    f"{QWEN_IMAGE}:QwenImageResidualBlock.forward",
    f"{QWEN_IMAGE}:QwenImageAttentionBlock.forward",
    f"{QWEN_IMAGE}:QwenImageResample.forward",
    f"{QWEN_IMAGE}:QwenImageUpsample.forward",
    f"{QWEN_IMAGE}:QwenImageCausalConv3d.forward",
    f"{QWEN_IMAGE}:QwenImageRMS_norm.forward",
)


def _read(vae: Any) -> DecoderGraph:
    from .decoder_graph import read

    return read(vae)


def _decode(run: Run, vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
    from wanshim.core.decoding import TileSettings

    from .decoder_graph import answer, leave_if_taken

    leave_if_taken(vae, "decode")
    return answer(run(vae, z, tiles=TileSettings.of(vae), lean=bool(vae.use_tiling)), return_dict)


def _seam(target: str, *, required: bool) -> Seam:
    return Seam(
        target,
        replace_method(_decode, _read),
        in_graph=True,
        required=required,
        why="context parallelism covers transformers only: every rank decodes the whole video or image",
        upstream="https://github.com/huggingface/diffusers (no parallel VAE as of 0.42.1)",
        remove_when="diffusers splits this VAE's decode over ranks without changing its output",
    )


FEATURE = Feature(
    name="diffusers.vae_decode",
    summary="Wan and Qwen-Image VAE decode shared by all ranks of a torchrun job",
    switched_on_by="vae_mode",
    relies_on=DECODER,
    seams=(
        _seam(f"{WAN}:AutoencoderKLWan._decode", required=True),
        _seam(f"{QWEN_IMAGE}:AutoencoderKLQwenImage._decode", required=False),  # diffusers 0.35 and later
    ),
)
