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
from wanshim.patching.vae_method import replace_method

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, Call, Compute, Graph

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
    from wanshim.core.decoding import compute_untiled, graph_of, read_graph

    return graph_of(vae, verb, partial(read_graph, verb=verb, own=partial(compute_untiled, verb)))


def _decode(call: Call, vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
    from wanshim.core.decoding import TileSettings

    _leave_if_taken(vae, "decode")
    sample = call(z, tiles=TileSettings.of(vae), lean=bool(vae.use_tiling))
    if not return_dict:
        return (sample,)
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample)


def _encode(call: Call, vae: Any, x: torch.Tensor) -> Any:
    _leave_if_taken(vae, "encode")
    return call(x, lean=bool(vae.use_tiling))


METHODS: dict[str, Compute] = {"decode": _decode, "encode": _encode}


def _leave_if_taken(vae: Any, verb: str) -> None:
    """Ranks of a library that has the VAE wait for its own method."""
    from wanshim.core.decoding import VaeFallback

    if (holder := _holder(vae, verb)) is not None:
        raise VaeFallback(holder)


def _holder(vae: Any, verb: str) -> str | None:
    """The user of this VAE in parallel, or of its weights between calls; None: there is none.

    Args:
        verb: decode or encode.
    """
    if getattr(vae, "_is_parallelized", False) or getattr(vae, "_parallelism_config", None) is not None:
        return "cache-dit or diffusers' own parallelism holds it"
    for cls in type(vae).__mro__:
        if cls.__module__.startswith("diffusers."):
            break
        own = [name for name in (verb, f"_{verb}", f"tiled_{verb}") if name in cls.__dict__]
        if own:
            return f"{cls.__module__}.{cls.__qualname__} brings its own {own[0]}"
    tiles = vars(vae).get(f"tiled_{verb}")  # where xDiT puts DistVAE's; the decoder stays as it was
    if tiles is not None:
        return f"{tiles.__module__} brings its own tiled_{verb}"
    for name, module in getattr(vae, f"{verb}r").named_modules():
        package = type(module).__module__.split(".")[0]
        if package in ("distvae", "xfuser", "cache_dit"):
            return f"{package} has rebuilt {name or f'the {verb}r'}"
        if name and (hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")):
            return f"{name} is offloaded by a hook of its own"
    return None


def _ranks(vae: Any) -> dict[str, Any]:
    """All ranks share it, unless the class is another framework's."""
    from wanshim.core.decoding import VaeFallback

    if not type(vae).__module__.startswith("diffusers."):
        raise VaeFallback(f"{type(vae).__module__}.{type(vae).__qualname__} is not a class of diffusers")
    return {}


def _bind(verb: str, vae: Any) -> Binding:
    """The core in `_decode` or `_encode`, which `decode` and `encode` call, once per sample when slicing is on.

    Raises:
        ModelInvalid: the VAE is not built as the releases this adapter knows build it, or another library uses it in
            parallel already.
    """
    from wanshim.core.decoding import Binding
    from wanshim.errors import ModelInvalid

    if (holder := _holder(vae, verb)) is not None:
        raise ModelInvalid(
            f"{type(vae).__qualname__}: {holder}",
            expected=f"a VAE that nobody else {verb}s in parallel",
            hint=f"Switch the other one off for the VAE to use this one; its {verb} is left as it was",
        )
    return Binding(graph=_read(verb, vae), target=vae, methods={f"_{verb}": METHODS[verb]}, entry=verb)


BINDERS = dict.fromkeys((f"{WAN}.AutoencoderKLWan", f"{QWEN_IMAGE}.AutoencoderKLQwenImage"), _bind)


def _feature(verb: str, switched_on_by: str) -> Feature:
    targets = {
        f"{WAN}:AutoencoderKLWan._{verb}": True,
        f"{QWEN_IMAGE}:AutoencoderKLQwenImage._{verb}": False,  # diffusers 0.35 and later
    }
    return Feature(
        name=f"diffusers.vae_{verb}",
        summary=f"Wan and Qwen-Image VAE {verb} with fewer kernels, or shared by all ranks of a torchrun job",
        switched_on_by=switched_on_by,
        auto_with="generate",
        relies_on=COMPUTED[verb],
        seams=tuple(
            Seam(
                target,
                replace_method(METHODS[verb], partial(_read, verb), ranks=_ranks, verb=verb),
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
