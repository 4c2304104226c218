"""`fastvideo.vae_encode`: the ranks of a sequence-parallel group share the encode of a video for the Wan VAE.

With `use_feature_cache`, its default, FastVideo's Wan VAE encodes the full video on every rank. Here
`AutoencoderKLWan.encode` goes to the decode room on the sequence-parallel group. WANSHIM_VAE_ENCODE picks the mode,
WANSHIM_VAE_FAST=1 the fast operators. Ranks that hold different videos each encode their own with FastVideo, and the
report says so.
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

    from wanshim.core.decoding import EncoderGraph, Graph

MODULE = "fastvideo.models.vaes.wanvae"
GROUPS = "fastvideo.distributed.parallel_state"
# The code that the decode room computes instead: a release in which it differs is not patched.
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


def _read(vae: Any) -> EncoderGraph:
    from .encoder_graph import read

    return read(vae)


def _encode(run: Run, vae: Any, x: torch.Tensor) -> Any:
    from wanshim.core.decoding import VaeFallback, sequence_group

    from .encoder_graph import distribution

    if not vae.use_feature_cache:
        raise VaeFallback("use_feature_cache is off: FastVideo's own tiles, parallel where enabled, encode this")
    if not hasattr(vae, "encoder"):
        raise VaeFallback("this VAE was loaded without its encoder")
    lean = bool(getattr(vae, "use_tiling", False))
    return distribution(run(vae, x, group=sequence_group(GROUPS), lean=lean))


def _encode_fork(fork: Fork, run: Run, vae: Any, video: torch.Tensor) -> Any:
    from wanshim.core.decoding import VaeFallback, sequence_group

    if (refused := fork.refuses(vae, video.shape[2])) is not None:
        raise VaeFallback(refused)
    return fork.encode(vae, partial(run, vae, group=sequence_group(GROUPS)), video)


def _seam(
    target: str, call: Callable[..., Any], read: Callable[[Any], Graph] | None, why: str, *, required: bool = False
) -> Seam:
    return Seam(
        target,
        replace_method(call, read, verb="encode"),
        in_graph=True,
        required=required,
        why=why,
        upstream="https://github.com/hao-ai-lab/FastVideo (0.2.1: encode of its Wan VAEs)",
        remove_when="this VAE's encode is split over the ranks without changing its output",
    )


FEATURE = Feature(
    name="fastvideo.vae_encode",
    summary="encode of the Wan, Cosmos 2.5 and LingBot-World VAEs shared by the ranks of a sequence-parallel group",
    switched_on_by="vae_encode",
    relies_on=(
        *(f"{MODULE}:{name}" for name in ENCODER),
        *(target for fork in FORKS for target in fork.targets("Encoder3d")),
    ),
    seams=(
        _seam(
            f"{MODULE}:AutoencoderKLWan.encode",
            _encode,
            _read,
            "use_feature_cache, the default, bypasses the parallel tiles: every rank encodes the full video",
            required=True,
        ),
        *(
            _seam(
                f"{fork.module}:{fork.name}.encode",
                partial(_encode_fork, fork),
                fork.read_encoder,
                "every rank encodes the full video",
            )
            for fork in FORKS
        ),
    ),
)
