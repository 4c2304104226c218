"""The exact decode and encode in place of vLLM-Omni's tile executor, on its group and at its size.

From 0.18 on vLLM-Omni decodes tiles in parallel, from 0.20 on it encodes them: it blends seams and does a third more
work than one GPU does without tiles. Named explicitly, these features send `tiled_decode` of its distributed Wan and
Qwen-Image VAEs and `tiled_encode` of Wan's to the decode room instead. The same ranks get the result as before: the
first rank the frames of a Wan video, all ranks those of a Qwen image and every latent. vLLM-Omni's spatial shard, if it
is chosen, is left alone. WANSHIM_VAE_MODE and WANSHIM_VAE_ENCODE pick the mode, WANSHIM_VAE_FAST=1 the fast operators.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import SharedCall, replace_method

from .executor import QWEN_IMAGE, RELIES_ON, WAN, ranks_of_executor

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import DecoderGraph, EncoderGraph


def _decode(
    receivers: tuple[int, ...] | None, run: SharedCall, vae: Any, z: torch.Tensor, return_dict: bool = True
) -> Any:
    from wanshim.core.decoding import OutputSpec, TileSettings

    from .decoder_graph import wrap_output

    output = OutputSpec(ranks=receivers)
    sample = run(vae, z, **ranks_of_executor(vae), output=output, tiles=TileSettings.of(vae), lean=True)
    return wrap_output(sample, return_dict)


def _encode(run: SharedCall, vae: Any, x: torch.Tensor) -> Any:
    return run(vae, x, **ranks_of_executor(vae), lean=True)


def _read_decoder(vae: Any) -> DecoderGraph:
    from .decoder_graph import read

    return read(vae)


def _read_encoder(vae: Any) -> EncoderGraph:
    from .encoder_graph import read_patched_graph

    return read_patched_graph(vae)


def _decode_seam(target: str, receivers: tuple[int, ...] | None, *, required: bool) -> Seam:
    return Seam(
        target,
        replace_method(partial(_decode, receivers), _read_decoder),
        required=required,
        closure_because="a user who compiles the VAE's decode reaches it",
        why="tiles are decoded apart: they blend over seams and repeat 1.65 times the work",
        upstream="https://github.com/vllm-project/vllm-omni/pull/1366",
        remove_when="vLLM-Omni's default parallel decode of this VAE is exact and its fast path combines with sharding",
    )


FEATURES = (
    Feature(
        name="vllm_omni.vae_decode",
        summary="the exact parallel Wan and Qwen-Image decode in place of vLLM-Omni's tiles",
        relies_on=RELIES_ON,
        seams=(
            _decode_seam(f"{WAN}:DistributedAutoencoderKLWan.tiled_decode", (0,), required=True),
            _decode_seam(f"{QWEN_IMAGE}:DistributedAutoencoderKLQwenImage.tiled_decode", None, required=False),
        ),
    ),
    Feature(
        name="vllm_omni.vae_encode",
        summary="the exact parallel Wan encode in place of vLLM-Omni's tiles",
        relies_on=RELIES_ON,
        seams=(
            Seam(
                f"{WAN}:DistributedAutoencoderKLWan.tiled_encode",
                replace_method(_encode, _read_encoder, verb="encode"),
                closure_because="a user who compiles the VAE's encode reaches it",
                why="tiles are encoded apart: latents blend over seams and overlaps are encoded twice",
                upstream="https://github.com/vllm-project/vllm-omni (0.20: DistributedAutoencoderKLWan.tiled_encode)",
                remove_when="vLLM-Omni's default parallel encode of Wan is exact",
            ),
        ),
    ),
)
