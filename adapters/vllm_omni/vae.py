"""The exact decode and encode in place of vLLM-Omni's own: of tiles on its group, and of whole pictures on one GPU.

From 0.18 on vLLM-Omni decodes tiles in parallel, from 0.20 on it encodes them: it blends seams and does a third more
work than one GPU does without tiles. Named explicitly, these features send `tiled_decode` of its distributed Wan and
Qwen-Image VAEs and `tiled_encode` of Wan's to the decode room instead. The same ranks get the result as before: the
first rank the frames of a Wan video, all ranks those of a Qwen image and every latent. One GPU decodes and encodes
whole pictures, whether it was asked for tiles (`--vae-use-tiling`) or not; then a picture no larger than a tile is
vLLM-Omni's. Several GPUs share tiles alone: without tiles each computes its own. vLLM-Omni's spatial shard, if it is
chosen, and its decode by chunks are left alone. WANSHIM_VAE_MODE and WANSHIM_VAE_ENCODE pick the mode,
WANSHIM_VAE_FAST=1 the fast operators.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import replace_method

if TYPE_CHECKING:
    import torch
    from torch import nn

    from wanshim.core.decoding import Binding, Call, Compute, Graph

MODULES = "vllm_omni.diffusion.distributed.autoencoders"
WAN = f"{MODULES}.autoencoder_kl_wan"
QWEN_IMAGE = f"{MODULES}.autoencoder_kl_qwenimage"
LAYERED = "vllm_omni.diffusion.models.qwen_image.autoencoder_kl_qwenimage"
FAST_PATH = f"{MODULES}.wan_vae_fastpath"  # vae_fast_path, from 0.30 on by default on CUDA
EXECUTOR = (
    f"{MODULES}.distributed_vae_executor:DistributedVaeMixin.is_distributed_enabled",
    f"{MODULES}.distributed_vae_executor:DistributedVaeExecutor.__init__",
)
# What vLLM-Omni puts around and in place of diffusers' untiled path, in the releases that have it.
UNTILED = {"decode": ("decode", "_decode", "_decode_temporal"), "encode": ("encode", "_encode")}


def read(verb: str, vae: Any) -> Graph:
    """Wan's VAEs are diffusers' with vLLM-Omni's norm in them, and from 0.30 an autocast around the decoder.
    Qwen-Image's are diffusers' too; the layered one is a copy, whose images have four channels.
    """
    from wanshim.core.decoding import compute_untiled, read_graph

    return read_graph(vae, verb, own=partial(compute_untiled, verb), rebound=_is_fast_path)


def _is_fast_path(module: nn.Module) -> bool:
    """Whether its forward is one of vLLM-Omni's lossless fast path. A wrapper around one has other globals, and with
    `channels_last` a norm adds in another order."""
    forward = module.__dict__["forward"]
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return False
    where = getattr(forward.__func__, "__globals__", {}).get("__name__", "")
    config = getattr(module, "_vllm_omni_wan_fastpath_cfg", None)
    return where.startswith(f"{FAST_PATH}.") and getattr(config, "channels_last", None) is False


def _read_of_patches(vae: Any) -> Graph:
    """The encoder as `tiled_encode` has it, which is given patches in place of pixels."""
    from dataclasses import replace

    from wanshim.core.decoding import read_graph

    return replace(read_graph(vae, "encode", own=_own_latents_of_patches, rebound=_is_fast_path), patch_size=1)


def _own_latents_of_patches(vae: Any, patches: torch.Tensor) -> Any:
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    from wanshim.core.decoding import compute_untiled

    size = getattr(vae.config, "patch_size", None)
    return compute_untiled("encode", vae, patches if size is None else unpatchify(patches, size))


def decode(call: Call, vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
    from wanshim.core.decoding import TileSettings

    sample = call(z, tiles=TileSettings.of(vae), lean=bool(vae.use_tiling))
    if not return_dict:
        return (sample,)
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample)


def _encode(call: Call, vae: Any, x: torch.Tensor) -> Any:
    return call(x, lean=bool(vae.use_tiling))


METHODS: dict[str, Compute] = {"decode": decode, "encode": _encode}


def _ranks(receivers: tuple[int, ...] | None, vae: Any) -> dict[str, Any]:
    """The group of the executor of tiles, and how many of its ranks are active; on one GPU nothing: the process itself.

    Raises:
        VaeFallback: the executor would not work, or vLLM-Omni was asked for another way than tiles.
    """
    from wanshim.core.decoding import OutputSpec, VaeFallback

    if not vae.is_distributed_enabled():
        return _alone(vae)
    executor = getattr(vae, "distributed_executor", None) or vae.distributed_decoder  # 0.18 calls it a decoder
    mode = getattr(executor, "parallel_mode", "tile")
    if mode != "tile":
        raise VaeFallback(f"vLLM-Omni's own {mode} is chosen")
    return {"group": executor.group, "active": int(executor.parallel_size), "output": OutputSpec(ranks=receivers)}


def _alone(vae: Any) -> dict[str, Any]:
    """One process is a group of one.

    Raises:
        VaeFallback: there are several, and vLLM-Omni lets each work for itself.
    """
    import torch.distributed as dist

    from wanshim.core.decoding import VaeFallback

    if dist.is_initialized() and dist.get_world_size() > 1:
        why = "vae_patch_parallel_size asks for no parallel VAE" if vae.use_tiling else "several GPUs share tiles alone"
        raise VaeFallback(why)
    return {}


def _has_no_tiles(vae: Any, *args: Any, **kwargs: Any) -> bool:
    """With tiling on, `_decode` and `_encode` call what makes tiles, which has a seam of its own, or leave a picture
    that is no larger than a tile to vLLM-Omni."""
    return not vae.use_tiling


def _bind(verb: str, vae: Any) -> Binding:
    """The core in `_decode` or `_encode`, in place of the tile executor and the spatial shard behind it.

    Raises:
        ModelInvalid: the VAE is not built as the releases this adapter knows build it, or vLLM-Omni's spatial shard has
            replaced its convolutions already.
    """
    from wanshim.core.decoding import Binding
    from wanshim.errors import ModelInvalid

    if verb == "decode" and getattr(vae, "_vllm_omni_wan_spatial_shard_installed", False):
        raise ModelInvalid(
            "vLLM-Omni's spatial shard has rebuilt this decoder",
            expected="a decoder as it was loaded",
            hint="Use --vae-parallel-mode tile, or leave the decode to vLLM-Omni",
        )
    return Binding(graph=read(verb, vae), target=vae, methods={f"_{verb}": METHODS[verb]}, entry=verb)


BINDERS = dict.fromkeys(
    (
        f"{WAN}.DistributedAutoencoderKLWan",
        f"{WAN}.OmniAutoencoderKLWan",
        f"{QWEN_IMAGE}.DistributedAutoencoderKLQwenImage",
        f"{LAYERED}.AutoencoderKLQwenImage",
    ),
    _bind,
)


def _tiles_of_decode(target: str, receivers: tuple[int, ...] | None, *, required: bool) -> Seam:
    return Seam(
        target,
        replace_method(decode, partial(read, "decode"), ranks=partial(_ranks, receivers)),
        required=required,
        closure_because="a user who compiles the VAE's decode reaches it",
        why="tiles are decoded apart: they blend over seams and repeat 1.65 times the work",
        upstream="https://github.com/vllm-project/vllm-omni/pull/1366",
        remove_when="vLLM-Omni's default parallel decode of this VAE is exact and its fast path combines with sharding",
    )


def _whole(verb: str) -> tuple[Seam, ...]:
    """Most of these classes have the method from diffusers, whose own class stays as it is."""
    targets = {
        f"{WAN}:DistributedAutoencoderKLWan._{verb}": True,
        f"{QWEN_IMAGE}:DistributedAutoencoderKLQwenImage._{verb}": False,
        f"{LAYERED}:AutoencoderKLQwenImage._{verb}": False,
    }
    return tuple(
        Seam(
            target,
            replace_method(METHODS[verb], partial(read, verb), ranks=_alone, applies=_has_no_tiles, verb=verb),
            required=required,
            inherited=True,
            closure_because=f"a user who compiles the VAE's {verb} reaches it",
            why=f"one GPU {verb}s a picture without tiles by more passes over its memory than equal bits need",
            upstream="https://github.com/vllm-project/vllm-omni (0.30: wan_vae_fastpath, for Wan's decode on CUDA)",
            remove_when=f"vLLM-Omni's own {verb} of this VAE on one GPU is as fast",
        )
        for target, required in targets.items()
    )


FEATURES = (
    Feature(
        name="vllm_omni.vae_decode",
        summary="the exact Wan and Qwen-Image decode: parallel in place of vLLM-Omni's tiles, whole on one GPU",
        relies_on=(*EXECUTOR, *(f"{WAN}:OmniAutoencoderKLWan.{name}" for name in UNTILED["decode"])),
        seams=(
            _tiles_of_decode(f"{WAN}:DistributedAutoencoderKLWan.tiled_decode", (0,), required=True),
            _tiles_of_decode(f"{QWEN_IMAGE}:DistributedAutoencoderKLQwenImage.tiled_decode", None, required=False),
            *_whole("decode"),
        ),
    ),
    Feature(
        name="vllm_omni.vae_encode",
        summary="the exact Wan and Qwen-Image encode: parallel in place of vLLM-Omni's tiles, whole on one GPU",
        relies_on=(*EXECUTOR, *(f"{WAN}:OmniAutoencoderKLWan.{name}" for name in UNTILED["encode"])),
        seams=(
            Seam(
                f"{WAN}:DistributedAutoencoderKLWan.tiled_encode",
                replace_method(_encode, _read_of_patches, ranks=partial(_ranks, None), verb="encode"),
                required=False,  # 0.20 and later
                closure_because="a user who compiles the VAE's encode reaches it",
                why="tiles are encoded apart: latents blend over seams and overlaps are encoded twice",
                upstream="https://github.com/vllm-project/vllm-omni (0.20: DistributedAutoencoderKLWan.tiled_encode)",
                remove_when="vLLM-Omni's default parallel encode of Wan is exact",
            ),
            *_whole("encode"),
        ),
    ),
)
