"""`fastvideo.vae_decode`: the ranks of a sequence-parallel group share the decode of a Wan video.

With `use_feature_cache`, its default, FastVideo's Wan VAE never reaches its parallel tiles: every rank decodes the
full video. Here `AutoencoderKLWan.decode` goes to the decode room on the sequence-parallel group. WANSHIM_VAE_MODE
picks the mode, WANSHIM_VAE_FAST=1 the fast operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.patching import Feature, Seam, SeamState

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import SharedDecodes

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


def _share(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    @cache
    def decodes() -> SharedDecodes:
        import torch

        from wanshim.core.decoding import SharedDecodes, read_graph

        return SharedDecodes("fastvideo.vae_decode", lambda vae: read_graph(vae, output_dtype=torch.float32))

    def decode(self: Any, z: torch.Tensor) -> Any:
        import torch

        if torch.compiler.is_compiling() or not seam.enter():
            return original(self, z)
        return decodes().decode_or(seam.notes, lambda: _decode_shared(decodes(), self, z), lambda: original(self, z))

    return decode


def _decode_shared(decodes: SharedDecodes, vae: Any, z: torch.Tensor) -> Any:
    from wanshim.core.decoding import NotShared, chosen_options, sequence_group

    read = settings.read()
    options = chosen_options(read.vae_mode, read.vae_fast)
    if not vae.use_feature_cache:
        raise NotShared("use_feature_cache is off: FastVideo's own tiles, parallel where enabled, decode this")
    if getattr(vae.config, "use_light_vae", False):
        raise NotShared("the light VAE upsamples the first frame in time too; the decode room does not know it")
    return decodes.run(vae, z, options, group=sequence_group(GROUPS), lean=bool(getattr(vae, "use_tiling", False)))


FEATURE = Feature(
    name="fastvideo.vae_decode",
    summary="Wan VAE decode shared by the ranks of a sequence-parallel group",
    switched_on_by="vae_mode",
    relies_on=tuple(f"{MODULE}:{name}" for name in DECODER),
    seams=(
        Seam(
            f"{MODULE}:AutoencoderKLWan.decode",
            _share,
            in_graph=True,
            why="use_feature_cache, the default, bypasses the parallel tiles: every rank decodes the full video",
            upstream="https://github.com/hao-ai-lab/FastVideo (0.2.1: AutoencoderKLWan.decode)",
            remove_when="the cached decode of the Wan VAE is split over the ranks without changing its output",
        ),
    ),
)
