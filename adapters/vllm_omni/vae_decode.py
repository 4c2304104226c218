"""`vllm_omni.vae_decode`: the exact decode in place of vLLM-Omni's tile executor, on its group and at its size.

From 0.18 on vLLM-Omni decodes tiles in parallel: seams blended, a third more work than one GPU untiled does. Named
explicitly, this feature sends `tiled_decode` of its distributed Wan and Qwen-Image VAEs to the decode room instead. Who
gets frames stays as it was: of a Wan video the first rank, of a Qwen image all ranks. vLLM-Omni's spatial shard, where
it is chosen, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.core.vae_method import replace_method
from wanshim.patching import Feature, Seam

from .executor import QWEN_IMAGE, RELIES_ON, WAN

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import VaeCache


def _answer(sample: torch.Tensor, return_dict: bool) -> Any:
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample) if return_dict else (sample,)


def _decode_wan(cache: VaeCache, vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
    return _decode(cache, vae, z, return_dict, receivers=(0,))


def _decode_qwen_image(cache: VaeCache, vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
    return _decode(cache, vae, z, return_dict, receivers=None)


def _decode(cache: VaeCache, vae: Any, z: torch.Tensor, return_dict: bool, *, receivers: tuple[int, ...] | None) -> Any:
    from wanshim.core.decoding import OutputSpec, TileSettings, chosen_options

    from .executor import in_its_place

    read = settings.read()
    options, group = in_its_place(vae, chosen_options(read.vae_mode, read.vae_fast), OutputSpec(ranks=receivers))
    return _answer(cache.run(vae, z, options, group=group, tiles=TileSettings.of(vae), lean=True), return_dict)


def _seam(target: str, call: Callable[..., Any], *, required: bool) -> Seam:
    return Seam(
        target,
        replace_method("vllm_omni.vae_decode", call),
        required=required,
        closure_because="a user who compiles the VAE's decode reaches it",
        why="tiles are decoded apart: they blend over seams and repeat 1.65 times the work",
        upstream="https://github.com/vllm-project/vllm-omni/pull/1366",
        remove_when="vLLM-Omni's default parallel decode of this VAE is exact and its fast path combines with sharding",
    )


FEATURE = Feature(
    name="vllm_omni.vae_decode",
    summary="the exact parallel Wan and Qwen-Image decode in place of vLLM-Omni's tiles",
    relies_on=RELIES_ON,
    seams=(
        _seam(f"{WAN}:DistributedAutoencoderKLWan.tiled_decode", _decode_wan, required=True),
        _seam(f"{QWEN_IMAGE}:DistributedAutoencoderKLQwenImage.tiled_decode", _decode_qwen_image, required=False),
    ),
)
