"""`diffsynth.vae_decode`: in a torchrun or USP job all ranks decode their share of the video.

DiffSynth decodes the whole video on every rank, and `tiled=True`, its pipelines' default, does three times the work
and blends on the CPU. Here `WanVideoVAE.decode` goes to the decode room. Who asked for tiles gets the exact plan with
the least memory: the memory stays bounded, the seams go. WANSHIM_VAE_MODE picks the mode, WANSHIM_VAE_FAST=1 the fast
operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.core.vae_method import replace_method
from wanshim.patching import Feature, Seam

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import DecoderGraph, VaeCache

MODULE = "diffsynth.models.wan_video_vae"
GROUPS = "xfuser.core.distributed.parallel_state"  # of a USP job
# What the decode room computes in their place; they must be the code it knows.
DECODER = (
    "WanVideoVAE.single_decode",
    "VideoVAE_.decode",
    "VideoVAE38_.decode",
    "Decoder3d.forward",
    "Decoder3d_38.forward",
    "Up_ResidualBlock.forward",
    "ResidualBlock.forward",
    "AttentionBlock.forward",
    "Resample.forward",
    "Upsample.forward",
    "CausalConv3d.forward",
    "RMS_norm.forward",
    "DupUp3D.forward",
    "unpatchify",
)


def _read(vae: Any) -> DecoderGraph:
    from .decoder_graph import read_graph

    return read_graph(vae)


def _decode(
    cache: VaeCache,
    vae: Any,
    hidden_states: torch.Tensor,
    device: torch.device | str,
    tiled: bool = False,
    *_: object,
    **__: object,
) -> Any:
    """Videos one by one, as DiffSynth does, each on all ranks; on the CPU where DiffSynth would have blended there."""
    import torch

    from wanshim.core.decoding import chosen_options, sequence_group

    from .decoder_graph import denormalise

    read = settings.read()
    options = chosen_options(read.vae_mode, read.vae_fast)
    videos = []
    for hidden_state in hidden_states:
        latent = denormalise(vae, hidden_state.unsqueeze(0).to(device))
        frames = cache.run(vae, latent, options, group=sequence_group(GROUPS), lean=bool(tiled))
        videos.append((frames.cpu() if tiled else frames).squeeze(0))
    return torch.stack(videos)


FEATURE = Feature(
    name="diffsynth.vae_decode",
    summary="Wan VAE decode shared by all ranks of a torchrun or USP job",
    switched_on_by="vae_mode",
    relies_on=tuple(f"{MODULE}:{name}" for name in DECODER),
    seams=(
        Seam(
            f"{MODULE}:WanVideoVAE.decode",
            replace_method("diffsynth.vae_decode", _decode, _read),
            closure_because="a user who compiles the VAE reaches it; DiffSynth compiles the DiT alone",
            why="every rank decodes the whole video; tiled=True repeats three times the work and leaves seams",
            upstream="https://github.com/modelscope/DiffSynth-Studio (no parallel VAE as of 2.1.12)",
            remove_when="WanVideoVAE.decode shares its work in a USP job without changing its output",
        ),
    ),
)
