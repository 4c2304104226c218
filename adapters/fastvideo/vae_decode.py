"""`fastvideo.vae_decode`: the ranks of a sequence-parallel group share the decode of a Wan video.

With `use_feature_cache`, its default, FastVideo's Wan VAE never reaches its parallel tiles: every rank decodes the
full video. Here `AutoencoderKLWan.decode` goes to the decode room on the sequence-parallel group. WANSHIM_VAE_MODE
picks the mode, WANSHIM_VAE_FAST=1 the fast operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.core.vae_method import replace_method
from wanshim.patching import Feature, Seam

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import DecoderGraph, VaeCache

MODULE = "fastvideo.models.vaes.wanvae"
GROUPS = "fastvideo.distributed.parallel_state"
# What the decode room computes in their place; they must be the code it knows.
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
    import torch

    from wanshim.core.decoding import read_graph

    return read_graph(vae, output_dtype=torch.float32)


def _decode(cache: VaeCache, vae: Any, z: torch.Tensor) -> Any:
    from wanshim.core.decoding import VaeFallback, chosen_options, sequence_group

    read = settings.read()
    options = chosen_options(read.vae_mode, read.vae_fast)
    if not vae.use_feature_cache:
        raise VaeFallback("use_feature_cache is off: FastVideo's own tiles, parallel where enabled, decode this")
    if getattr(vae.config, "use_light_vae", False):
        raise VaeFallback("the light VAE upsamples the first frame in time too; the decode room does not know it")
    return cache.run(vae, z, options, group=sequence_group(GROUPS), lean=bool(getattr(vae, "use_tiling", False)))


FEATURE = Feature(
    name="fastvideo.vae_decode",
    summary="Wan VAE decode shared by the ranks of a sequence-parallel group",
    switched_on_by="vae_mode",
    relies_on=tuple(f"{MODULE}:{name}" for name in DECODER),
    seams=(
        Seam(
            f"{MODULE}:AutoencoderKLWan.decode",
            replace_method("fastvideo.vae_decode", _decode, _read),
            in_graph=True,
            why="use_feature_cache, the default, bypasses the parallel tiles: every rank decodes the full video",
            upstream="https://github.com/hao-ai-lab/FastVideo (0.2.1: AutoencoderKLWan.decode)",
            remove_when="the cached decode of the Wan VAE is split over the ranks without changing its output",
        ),
    ),
)
