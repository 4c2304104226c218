"""`fastvideo.vae_decode`: the ranks of a sequence-parallel group share the decode of a Wan video.

With `use_feature_cache`, its default, FastVideo's Wan VAE never reaches its parallel tiles: every rank decodes the
full video. Here `AutoencoderKLWan.decode` goes to the decode room on the sequence-parallel group. WANSHIM_VAE_MODE
picks the mode, WANSHIM_VAE_FAST=1 the fast operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import Run, replace_method

from .wan_forks import FORKS, Fork

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import DecoderGraph, Graph

MODULE = "fastvideo.models.vaes.wanvae"
GROUPS = "fastvideo.distributed.parallel_state"
# The code that the decode room computes instead: a release in which it differs is not patched.
DECODER = (
    "WanDecoder3d.forward",
    "WanMidBlock.forward",
    "WanUpBlock.forward",
    "WanResidualUpBlock.forward",
    "WanResidualBlock.forward",
    "WanAttentionBlock.forward",
    "WanResample.forward",
    "WanUpsample.forward",
    "WanCausalConv3d.forward",
    "WanRMS_norm.forward",
    "DupUp3D.forward",
    "unpatchify",
)


def _read(vae: Any) -> DecoderGraph:
    from .decoder_graph import read

    return read(vae)


def _decode(run: Run, vae: Any, z: torch.Tensor) -> Any:
    from wanshim.core.decoding import VaeFallback, sequence_group

    if not vae.use_feature_cache:
        raise VaeFallback("use_feature_cache is off: FastVideo's own tiles, parallel where enabled, decode this")
    if getattr(vae.config, "use_light_vae", False):
        raise VaeFallback("the light VAE upsamples the first frame in time too; the decode room does not know it")
    return run(vae, z, group=sequence_group(GROUPS), lean=bool(getattr(vae, "use_tiling", False)))


def _decode_fork(fork: Fork, run: Run, vae: Any, latents: torch.Tensor) -> Any:
    from wanshim.core.decoding import sequence_group

    return fork.decode(vae, partial(run, vae, group=sequence_group(GROUPS)), latents)


def _seam(
    target: str, call: Callable[..., Any], read: Callable[[Any], Graph] | None, why: str, *, required: bool = False
) -> Seam:
    return Seam(
        target,
        replace_method(call, read),
        in_graph=True,
        required=required,
        why=why,
        upstream="https://github.com/hao-ai-lab/FastVideo (0.2.1: decode of its Wan VAEs)",
        remove_when="this VAE's decode is split over the ranks without changing its output",
    )


FEATURE = Feature(
    name="fastvideo.vae_decode",
    summary="decode of the Wan, Cosmos 2.5 and LingBot-World VAEs shared by the ranks of a sequence-parallel group",
    switched_on_by="vae_mode",
    relies_on=(
        *(f"{MODULE}:{name}" for name in DECODER),
        *(target for fork in FORKS for target in fork.targets("Decoder3d")),
    ),
    seams=(
        _seam(
            f"{MODULE}:AutoencoderKLWan.decode",
            _decode,
            _read,
            "use_feature_cache, the default, bypasses the parallel tiles: every rank decodes the full video",
            required=True,
        ),
        *(
            _seam(
                f"{fork.module}:{fork.name}.decode",
                partial(_decode_fork, fork),
                fork.read_decoder,
                "every rank decodes the full video",
            )
            for fork in FORKS
        ),
    ),
)
