"""Every rank of a torchrun job decodes and encodes its share of a video or image.

`_decode` and `_encode` of `AutoencoderKLWan` and `AutoencoderKLQwenImage` go to the decode room when several ranks hold
the same latent or the same video (image to video, video to video, editing). WANSHIM_VAE_MODE and WANSHIM_VAE_ENCODE
pick the mode; WANSHIM_VAE_FAST=1 trades bit-identity for the fast operators. An image has one latent frame, which only
`spatial` shares. A VAE with tiling on gets the exact plan with the least memory. Ranks that hold different videos, as
in data-parallel training, each encode their own with diffusers. Whatever cannot be shared stays with diffusers, and the
report says why.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import SharedCall, replace_method

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Graph

WAN = "diffusers.models.autoencoders.autoencoder_kl_wan"
QWEN_IMAGE = "diffusers.models.autoencoders.autoencoder_kl_qwenimage"
BLOCKS = ("MidBlock", "ResidualBlock", "AttentionBlock", "Resample", "CausalConv3d", "RMS_norm")
# The code that the decode room computes instead: a release in which it differs is not patched.
COMPUTED = {
    "decode": (
        f"{WAN}:AutoencoderKLWan.decode",
        f"{WAN}:unpatchify",
        f"{WAN}:DupUp3D.forward",
        *(f"{WAN}:Wan{n}.forward" for n in ("Decoder3d", "UpBlock", "ResidualUpBlock", "Upsample", *BLOCKS)),
        f"{QWEN_IMAGE}:AutoencoderKLQwenImage.decode",
        *(f"{QWEN_IMAGE}:QwenImage{n}.forward" for n in ("Decoder3d", "UpBlock", "Upsample", *BLOCKS)),
    ),
    "encode": (
        f"{WAN}:AutoencoderKLWan.encode",
        f"{WAN}:patchify",
        f"{WAN}:AvgDown3D.forward",
        *(f"{WAN}:Wan{n}.forward" for n in ("Encoder3d", "ResidualDownBlock", *BLOCKS)),
        f"{QWEN_IMAGE}:AutoencoderKLQwenImage.encode",
        *(f"{QWEN_IMAGE}:QwenImage{n}.forward" for n in ("Encoder3d", *BLOCKS)),
    ),
}


def _read(verb: str, vae: Any) -> Graph:
    from . import decoder_graph, encoder_graph

    return encoder_graph.read(vae) if verb == "encode" else decoder_graph.read(vae)


def _decode(run: SharedCall, vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
    from wanshim.core.decoding import TileSettings

    from .decoder_graph import leave_if_taken, wrap_output

    leave_if_taken(vae, "decode")
    return wrap_output(run(vae, z, tiles=TileSettings.of(vae), lean=bool(vae.use_tiling)), return_dict)


def _encode(run: SharedCall, vae: Any, x: torch.Tensor) -> Any:
    from .decoder_graph import leave_if_taken

    leave_if_taken(vae, "encode")
    return run(vae, x, lean=bool(vae.use_tiling))


def _feature(verb: str, switched_on_by: str) -> Feature:
    call = _encode if verb == "encode" else _decode
    targets = {
        f"{WAN}:AutoencoderKLWan._{verb}": True,
        f"{QWEN_IMAGE}:AutoencoderKLQwenImage._{verb}": False,  # diffusers 0.35 and later
    }
    return Feature(
        name=f"diffusers.vae_{verb}",
        summary=f"Wan and Qwen-Image VAE {verb} shared by all ranks of a torchrun job",
        switched_on_by=switched_on_by,
        relies_on=COMPUTED[verb],
        seams=tuple(
            Seam(
                target,
                replace_method(call, partial(_read, verb), verb=verb),
                in_graph=True,
                required=required,
                why=f"context parallelism covers transformers only: every rank {verb}s the whole video or image",
                upstream="https://github.com/huggingface/diffusers (no parallel VAE as of 0.42.1)",
                remove_when=f"diffusers splits this VAE's {verb} over ranks without changing its output",
            )
            for target, required in targets.items()
        ),
    )


FEATURES = (_feature("decode", "vae_mode"), _feature("encode", "vae_encode"))
