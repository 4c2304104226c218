"""`vllm_omni.vae_encode`: the exact encode in place of vLLM-Omni's tile executor, on its group and at its size.

From 0.20 on vLLM-Omni encodes a tiling Wan VAE's video in tiles over the ranks: seams blended, overlaps encoded twice.
Named explicitly, this feature sends `DistributedAutoencoderKLWan.tiled_encode` to the decode room instead. Like the
executor it gives the latent to all ranks. WANSHIM_VAE_ENCODE picks the mode, WANSHIM_VAE_FAST=1 the fast operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import Run, replace_method

from .executor import RELIES_ON, WAN, ranks_of_executor

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import EncoderGraph


def _read(vae: Any) -> EncoderGraph:
    from .encoder_graph import read_patched_graph

    return read_patched_graph(vae)


def _encode(run: Run, vae: Any, x: torch.Tensor) -> Any:
    return run(vae, x, **ranks_of_executor(vae), lean=True)


FEATURE = Feature(
    name="vllm_omni.vae_encode",
    summary="the exact parallel Wan encode in place of vLLM-Omni's tiles",
    relies_on=RELIES_ON,
    seams=(
        Seam(
            f"{WAN}:DistributedAutoencoderKLWan.tiled_encode",
            replace_method(_encode, _read, verb="encode"),
            closure_because="a user who compiles the VAE's encode reaches it",
            why="tiles are encoded apart: latents blend over seams and overlaps are encoded twice",
            upstream="https://github.com/vllm-project/vllm-omni (0.20: DistributedAutoencoderKLWan.tiled_encode)",
            remove_when="vLLM-Omni's default parallel encode of Wan is exact",
        ),
    ),
)
