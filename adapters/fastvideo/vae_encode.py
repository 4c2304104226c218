"""`fastvideo.vae_encode`: the ranks of a sequence-parallel group share the encode of a video for the Wan VAE.

With `use_feature_cache`, its default, FastVideo's Wan VAE encodes the full video on every rank. Here
`AutoencoderKLWan.encode` goes to the decode room on the sequence-parallel group. WANSHIM_VAE_ENCODE picks the mode,
WANSHIM_VAE_FAST=1 the fast operators. Ranks that hold different videos encode each its own with FastVideo, and the
report says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.core.vae_method import replace_method
from wanshim.patching import Feature, Seam

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import VaeCache

MODULE = "fastvideo.models.vaes.wanvae"
GROUPS = "fastvideo.distributed.parallel_state"
# What the decode room computes in their place; they must be the code it knows.
ENCODER = (
    "WanEncoder3d.forward",
    "WanResidualDownBlock.forward",
    "WanMidBlock.forward",
    "WanResidualBlock.forward",
    "WanAttentionBlock.forward",
    "WanResample.forward",
    "WanCausalConv3d.forward",
    "WanRMS_norm.forward",
    "AvgDown3D.forward",
    "patchify",
)


def _encode(cache: VaeCache, vae: Any, x: torch.Tensor) -> Any:
    from wanshim.core.decoding import VaeFallback, chosen_options, sequence_group

    from .encoder_graph import distribution

    read = settings.read()
    options = chosen_options(read.vae_encode, read.vae_fast, verb="encode")
    if not vae.use_feature_cache:
        raise VaeFallback("use_feature_cache is off: FastVideo's own tiles, parallel where enabled, encode this")
    if not hasattr(vae, "encoder"):
        raise VaeFallback("this VAE was loaded without its encoder")
    lean = bool(getattr(vae, "use_tiling", False))
    return distribution(cache.run(vae, x, options, group=sequence_group(GROUPS), lean=lean))


FEATURE = Feature(
    name="fastvideo.vae_encode",
    summary="Wan VAE encode shared by the ranks of a sequence-parallel group",
    switched_on_by="vae_encode",
    relies_on=tuple(f"{MODULE}:{name}" for name in ENCODER),
    seams=(
        Seam(
            f"{MODULE}:AutoencoderKLWan.encode",
            replace_method("fastvideo.vae_encode", _encode, verb="encode"),
            in_graph=True,
            why="use_feature_cache, the default, bypasses the parallel tiles: every rank encodes the full video",
            upstream="https://github.com/hao-ai-lab/FastVideo (0.2.1: AutoencoderKLWan.encode)",
            remove_when="the cached encode of the Wan VAE is split over the ranks without changing its output",
        ),
    ),
)
