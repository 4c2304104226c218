"""`vllm_omni.vae_decode`: the exact decode in place of vLLM-Omni's tile executor, on its group and at its size.

From 0.18 on vLLM-Omni decodes tiles in parallel: it blends seams and does a third more work than one GPU does without
tiles. Named explicitly, this feature sends `tiled_decode` of its distributed Wan and Qwen-Image VAEs to the decode room
instead. The same ranks get the frames as before: the first rank those of a Wan video, all ranks those of a Qwen image.
vLLM-Omni's spatial shard, if it is chosen, is left alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import Run, replace_method

from .executor import QWEN_IMAGE, RELIES_ON, WAN, ranks_of_executor

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import DecoderGraph


def _decode(receivers: tuple[int, ...] | None, run: Run, vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
    from wanshim.core.decoding import OutputSpec, TileSettings

    from .decoder_graph import answer

    output = OutputSpec(ranks=receivers)
    sample = run(vae, z, **ranks_of_executor(vae), output=output, tiles=TileSettings.of(vae), lean=True)
    return answer(sample, return_dict)


def _read(vae: Any) -> DecoderGraph:
    from .decoder_graph import read

    return read(vae)


def _seam(target: str, receivers: tuple[int, ...] | None, *, required: bool) -> Seam:
    return Seam(
        target,
        replace_method(partial(_decode, receivers), _read),
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
        _seam(f"{WAN}:DistributedAutoencoderKLWan.tiled_decode", (0,), required=True),
        _seam(f"{QWEN_IMAGE}:DistributedAutoencoderKLQwenImage.tiled_decode", None, required=False),
    ),
)
