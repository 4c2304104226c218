"""`diffsynth.vae_encode`: in a torchrun or USP job all ranks encode their share of the video.

DiffSynth encodes the whole video on every rank, and `tiled=True`, its pipelines' default, does the overlaps twice and
blends on the CPU. Here `WanVideoVAE.encode` goes to the decode room. Who asked for tiles gets the exact plan with the
least memory. WANSHIM_VAE_ENCODE picks the mode, WANSHIM_VAE_FAST=1 the fast operators. It serves pipelines and the
encode inside a training step where the ranks of a group hold one video; ranks that hold different ones, as in
data-parallel training and `sft:data_process`, encode each its own with DiffSynth and wait for nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.core.vae_method import replace_method
from wanshim.patching import Feature, Seam

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import EncoderGraph, VaeCache

MODULE = "diffsynth.models.wan_video_vae"
GROUPS = "xfuser.core.distributed.parallel_state"  # of a USP job
# What the decode room computes in their place; they must be the code it knows.
ENCODER = (
    "WanVideoVAE.single_encode",
    "VideoVAE_.encode",
    "VideoVAE38_.encode",
    "Encoder3d.forward",
    "Encoder3d_38.forward",
    "Down_ResidualBlock.forward",
    "ResidualBlock.forward",
    "AttentionBlock.forward",
    "Resample.forward",
    "CausalConv3d.forward",
    "RMS_norm.forward",
    "AvgDown3D.forward",
    "patchify",
)


def _read(vae: Any) -> EncoderGraph:
    from .encoder_graph import read_graph

    return read_graph(vae)


def _encode(
    cache: VaeCache,
    vae: Any,
    videos: Any,
    device: torch.device | str,
    tiled: bool = False,
    *_: object,
    **__: object,
) -> Any:
    """Videos one by one, as DiffSynth does, each on all ranks; on the CPU where DiffSynth would have blended there."""
    import torch

    from wanshim.core.decoding import chosen_options, sequence_group

    from .encoder_graph import normalise

    read = settings.read()
    options = chosen_options(read.vae_encode, read.vae_fast, verb="encode")
    latents = []
    for video in videos:
        encoded = cache.run(vae, video.unsqueeze(0).to(device), options, group=sequence_group(GROUPS), lean=bool(tiled))
        latent = normalise(vae, encoded)
        latents.append((latent.cpu() if tiled else latent).squeeze(0))
    return torch.stack(latents)


FEATURE = Feature(
    name="diffsynth.vae_encode",
    summary="Wan VAE encode shared by all ranks of a torchrun or USP job",
    switched_on_by="vae_encode",
    relies_on=tuple(f"{MODULE}:{name}" for name in ENCODER),
    seams=(
        Seam(
            f"{MODULE}:WanVideoVAE.encode",
            replace_method("diffsynth.vae_encode", _encode, _read, verb="encode"),
            closure_because="a user who compiles the VAE reaches it; DiffSynth compiles the DiT alone",
            why="every rank encodes the whole video; tiled=True repeats the overlaps and leaves seams",
            upstream="https://github.com/modelscope/DiffSynth-Studio (no parallel VAE as of 2.1.12)",
            remove_when="WanVideoVAE.encode shares its work in a USP job without changing its output",
        ),
    ),
)
