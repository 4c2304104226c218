"""The ranks of a sequence-parallel group share the decode and the encode of a Wan video.

With `use_feature_cache`, its default, FastVideo's Wan VAE never reaches its parallel tiles: every rank decodes and
encodes the full video. Here `AutoencoderKLWan.decode` and `.encode` go to the decode room on the sequence-parallel
group. WANSHIM_VAE_MODE and WANSHIM_VAE_ENCODE pick the mode, WANSHIM_VAE_FAST=1 the fast operators. Ranks that hold
different videos each encode their own with FastVideo, and the report says so.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import SharedCall, replace_method

from .wan_forks import FORKS, Fork

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Graph

MODULE = "fastvideo.models.vaes.wanvae"
GROUPS = "fastvideo.distributed.parallel_state"
BLOCKS = ("MidBlock", "ResidualBlock", "AttentionBlock", "Resample", "CausalConv3d", "RMS_norm")
# The code that the decode room computes instead: a release in which it differs is not patched.
COMPUTED = {
    "decode": (
        f"{MODULE}:unpatchify",
        f"{MODULE}:DupUp3D.forward",
        *(f"{MODULE}:Wan{n}.forward" for n in ("Decoder3d", "UpBlock", "ResidualUpBlock", "Upsample", *BLOCKS)),
        *(target for fork in FORKS for target in fork.targets("Decoder3d")),
    ),
    "encode": (
        f"{MODULE}:patchify",
        f"{MODULE}:AvgDown3D.forward",
        *(f"{MODULE}:Wan{n}.forward" for n in ("Encoder3d", "ResidualDownBlock", *BLOCKS)),
        *(target for fork in FORKS for target in fork.targets("Encoder3d")),
    ),
}


def _read(verb: str, vae: Any) -> Graph:
    from . import decoder_graph, encoder_graph

    return encoder_graph.read(vae) if verb == "encode" else decoder_graph.read(vae)


def _wan(verb: str, run: SharedCall, vae: Any, given: torch.Tensor) -> Any:
    from wanshim.core.decoding import VaeFallback, sequence_group

    from .encoder_graph import distribution

    if not vae.use_feature_cache:
        raise VaeFallback(f"use_feature_cache is off: FastVideo's own tiles, parallel where enabled, {verb} this")
    if verb == "decode" and getattr(vae.config, "use_light_vae", False):
        raise VaeFallback("the light VAE upsamples the first frame in time too; the decode room does not know it")
    if verb == "encode" and not hasattr(vae, "encoder"):
        raise VaeFallback("this VAE was loaded without its encoder")
    result = run(vae, given, group=sequence_group(GROUPS), lean=bool(getattr(vae, "use_tiling", False)))
    return distribution(result) if verb == "encode" else result


def _fork(verb: str, fork: Fork, run: SharedCall, vae: Any, given: torch.Tensor) -> Any:
    from wanshim.core.decoding import VaeFallback, sequence_group

    shared = partial(run, vae, group=sequence_group(GROUPS))
    if verb == "decode":
        return fork.decode(vae, shared, given)
    if (refused := fork.refuses(vae, given.shape[2])) is not None:
        raise VaeFallback(refused)
    return fork.encode(vae, shared, given)


def _feature(verb: str, switched_on_by: str) -> Feature:
    def seam(target: str, replacement: Any, why: str, *, required: bool = False) -> Seam:
        return Seam(
            target,
            replacement,
            in_graph=True,
            required=required,
            why=f"{why}every rank {verb}s the full video",
            upstream=f"https://github.com/hao-ai-lab/FastVideo (0.2.1: {verb} of its Wan VAEs)",
            remove_when=f"this VAE's {verb} is split over the ranks without changing its output",
        )

    return Feature(
        name=f"fastvideo.vae_{verb}",
        summary=f"{verb} of the Wan, Cosmos 2.5 and LingBot-World VAEs shared by the ranks of a sequence-parallel "
        "group",
        switched_on_by=switched_on_by,
        relies_on=COMPUTED[verb],
        seams=(
            seam(
                f"{MODULE}:AutoencoderKLWan.{verb}",
                replace_method(partial(_wan, verb), partial(_read, verb), verb=verb),
                "use_feature_cache, the default, bypasses the parallel tiles: ",
                required=True,
            ),
            *(
                seam(
                    f"{fork.module}:{fork.name}.{verb}",
                    replace_method(
                        partial(_fork, verb, fork),
                        fork.read_encoder if verb == "encode" else fork.read_decoder,
                        verb=verb,
                    ),
                    "",
                )
                for fork in FORKS
            ),
        ),
    )


FEATURES = (_feature("decode", "vae_mode"), _feature("encode", "vae_encode"))
