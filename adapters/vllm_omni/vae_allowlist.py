"""`vllm_omni.vae_allowlist`: on 0.16, `vae_patch_parallel_size` takes effect for Wan.

vLLM-Omni 0.16 has a parallel VAE decode, but admits three image pipelines only and passes 5-D latents through to the
plain decode. Wan's two pipelines are admitted, and their decode goes to the decode room on vLLM-Omni's own DiT group
with the size the user set. Image pipelines keep vLLM-Omni's decode.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Finding, Kind, Seam, SeamState, SourceTree
from wanshim.patching.vae_method import replace_method
from wanshim.patching.verdict import Verdict

from .vae import decode, read

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Call

ALLOWLIST = "vllm_omni.diffusion.registry:_VAE_PATCH_PARALLEL_ALLOWLIST"
INITIALIZE = "vllm_omni.diffusion.registry:initialize_model"
DECODE = "vllm_omni.diffusion.distributed.vae_patch_parallel:VaePatchParallelism.decode"
WAN_PIPELINES = frozenset({"WanPipeline", "WanImageToVideoPipeline"})


def _admit(original: Iterable[str], seam: SeamState) -> set[str]:
    """The allowlist with Wan's pipelines in it; vLLM-Omni's own set is left as it is."""
    return set(original) | WAN_PIPELINES


def _is_video(wrapper: Any, z: torch.Tensor, *_: object, **__: object) -> bool:
    return bool(z.ndim == 5)


def _decode(call: Call, wrapper: Any, z: torch.Tensor, return_dict: bool = True, *_: object, **__: object) -> Any:
    vae = wrapper._vae
    # diffusers' decode, which the wrapper replaces, decodes each video of a sliced batch alone: bits depend on that.
    return decode(partial(_each_video, call) if vae.use_slicing and len(z) > 1 else call, vae, z, return_dict)


def _each_video(call: Call, batch: torch.Tensor, **how: Any) -> torch.Tensor:
    import torch

    return torch.cat([call(z, **how) for z in batch.split(1)])


def _ranks(wrapper: Any) -> dict[str, Any]:
    """Every rank gets the frames, as from 0.16's own parallel decode."""
    from wanshim.core.decoding import VaeFallback

    if not hasattr(wrapper._vae, "tile_sample_stride_height"):
        raise VaeFallback(f"{type(wrapper._vae).__qualname__} is no Wan VAE")
    try:
        group = wrapper._group_getter()
    except Exception as error:  # vLLM-Omni's own decode takes any failure here as "not parallel"
        raise VaeFallback(f"vLLM-Omni has no DiT group here: {error}") from error
    return {"group": group, "active": wrapper._vae_patch_parallel_size}


def _judge(source: SourceTree) -> Finding | None:
    """Whether the registry still has an allowlist, and whether Wan is on it."""
    registry = source.node(INITIALIZE)
    if registry is None:
        return None
    if not any(
        isinstance(node, ast.Attribute) and node.attr == "vae_patch_parallel_size" for node in ast.walk(registry)
    ):
        return Finding(Verdict.REFUSE, "this release has no vae_patch_parallel_size: there is nothing to admit Wan to")
    if source.node(ALLOWLIST) is None:
        return Finding(Verdict.NATIVE, "the allowlist is gone: Wan's VAE is distributed by vLLM-Omni itself")
    return None


FEATURE = Feature(
    name="vllm_omni.vae_allowlist",
    summary="vae_patch_parallel_size takes effect for Wan on 0.16",
    auto=True,
    judge=_judge,
    relies_on=(INITIALIZE,),
    seams=(
        Seam(
            ALLOWLIST,
            _admit,
            kind=Kind.VALUE,
            why="the parallel decode leaves Wan out: a warning, and every rank decodes alone",
            upstream="https://github.com/vllm-project/vllm-omni/pull/1366",
            remove_when="0.16 is no longer supported; 0.18 distributes the Wan VAE itself",
        ),
        Seam(
            DECODE,
            replace_method(
                _decode, partial(read, "decode"), ranks=_ranks, applies=_is_video, vae_of=attrgetter("_vae")
            ),
            closure_because="a user who compiles the VAE's decode reaches it",
            why="5-D latents fall through to the plain decode",
            upstream="https://github.com/vllm-project/vllm-omni/pull/1366",
            remove_when="0.16 is no longer supported",
        ),
    ),
)
