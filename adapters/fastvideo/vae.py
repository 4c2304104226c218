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
from wanshim.patching.vae_method import replace_method

from .wan_forks import FORKS, Fork

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, Call, Graph

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
    """The decoder or encoder.

    Raises:
        ModelInvalid: the VAE is not built as the releases this adapter knows build it, was loaded without its encoder,
            or is the light VAE, which upsamples the first frame in time too.
    """
    import torch

    from wanshim.core.decoding import read_graph
    from wanshim.errors import ModelInvalid

    if verb == "encode":
        if not hasattr(vae, "encoder"):
            raise ModelInvalid(
                "this VAE was loaded without its encoder", expected="load_encoder=True in its configuration"
            )
        return read_graph(vae, verb, own=lambda vae, video: vae.encode(video).parameters)
    if getattr(vae.config, "use_light_vae", False):
        raise ModelInvalid(
            "this VAE is FastVideo's light VAE", expected="the Wan 2.1 or 2.2 VAE", hint="Its decode is left as it was"
        )
    return read_graph(vae, output_dtype=torch.float32, own=lambda vae, z: vae.decode(z))


def _wan(verb: str, call: Call, vae: Any, given: torch.Tensor) -> Any:
    """Frames in fp32, or a distribution."""
    result = call(given)
    if verb == "decode":
        return result
    from fastvideo.models.vaes.common import DiagonalGaussianDistribution

    return DiagonalGaussianDistribution(result)


def _fork(verb: str, fork: Fork, call: Call, vae: Any, given: torch.Tensor) -> Any:
    from wanshim.core.decoding import VaeFallback

    if verb == "decode":
        return fork.decode(vae, call, given)
    if (refused := fork.refuses(vae, given.shape[2])) is not None:
        raise VaeFallback(refused)
    return fork.encode(vae, call, given)


def _ranks(verb: str, vae: Any) -> dict[str, Any]:
    from wanshim.core.decoding import VaeFallback

    if not vae.use_feature_cache:
        raise VaeFallback(f"use_feature_cache is off: FastVideo's own tiles, parallel where enabled, {verb} this")
    return _ranks_of_fork(vae)  # not `lean` where tiling is on: with use_feature_cache FastVideo makes no tiles


def _ranks_of_fork(vae: Any) -> dict[str, Any]:
    from wanshim.core.decoding import sequence_group

    return {"group": sequence_group(GROUPS)}


def _bind(verb: str, vae: Any) -> Binding:
    from wanshim.core.decoding import Binding

    return Binding(graph=_read(verb, vae), target=vae, methods={verb: partial(_wan, verb)})


def _bind_fork(fork: Fork, verb: str, vae: Any) -> Binding:
    from wanshim.core.decoding import Binding

    return Binding(graph=fork.read(verb, vae), target=vae, methods={verb: partial(_fork, verb, fork)})


BINDERS = {
    f"{MODULE}.AutoencoderKLWan": _bind,
    **{f"{fork.module}.{fork.name}": partial(_bind_fork, fork) for fork in FORKS},
}


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
                replace_method(partial(_wan, verb), partial(_read, verb), ranks=partial(_ranks, verb), verb=verb),
                "use_feature_cache, the default, bypasses the parallel tiles: ",
                required=True,
            ),
            *(
                seam(
                    f"{fork.module}:{fork.name}.{verb}",
                    replace_method(
                        partial(_fork, verb, fork), partial(fork.read, verb), ranks=_ranks_of_fork, verb=verb
                    ),
                    "",
                )
                for fork in FORKS
            ),
        ),
    )


FEATURES = (_feature("decode", "vae_mode"), _feature("encode", "vae_encode"))
