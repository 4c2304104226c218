"""`diffsynth.vae_encode`: in a torchrun or USP job all ranks encode their share of the video.

DiffSynth encodes the whole video on every rank, and `tiled=True`, its pipelines' default, does the overlaps twice and
blends on the CPU. Here `WanVideoVAE.encode` goes to the decode room. A caller that asks for tiles gets the exact plan
with the least memory. WANSHIM_VAE_ENCODE picks the mode, WANSHIM_VAE_FAST=1 the fast operators. The ranks of a group
share the encode of a video that all of them hold, in a pipeline or in a training step. Ranks that hold different
videos, as in data-parallel training and `sft:data_process`, each encode their own with DiffSynth and do not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import Run, replace_method

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import EncoderGraph

WAN = "diffsynth.models.wan_video_vae"
QWEN_IMAGE = "diffsynth.models.qwen_image_vae"
GROUPS = "xfuser.core.distributed.parallel_state"  # of a USP job
# The code that the decode room computes instead: a release in which it differs is not patched.
ENCODER = (
    f"{WAN}:WanVideoVAE.single_encode",
    f"{WAN}:VideoVAE_.encode",
    f"{WAN}:VideoVAE38_.encode",
    f"{WAN}:Encoder3d.forward",
    f"{WAN}:Encoder3d_38.forward",
    f"{WAN}:Down_ResidualBlock.forward",
    f"{WAN}:ResidualBlock.forward",
    f"{WAN}:AttentionBlock.forward",
    f"{WAN}:Resample.forward",
    f"{WAN}:CausalConv3d.forward",
    f"{WAN}:RMS_norm.forward",
    f"{WAN}:AvgDown3D.forward",
    f"{WAN}:patchify",
    f"{QWEN_IMAGE}:QwenImageEncoder3d.forward",
    f"{QWEN_IMAGE}:QwenImageMidBlock.forward",
    f"{QWEN_IMAGE}:QwenImageResidualBlock.forward",
    f"{QWEN_IMAGE}:QwenImageAttentionBlock.forward",
    f"{QWEN_IMAGE}:QwenImageResample.forward",
    f"{QWEN_IMAGE}:QwenImageCausalConv3d.forward",
    f"{QWEN_IMAGE}:QwenImageRMS_norm.forward",
)


def _read(vae: Any) -> EncoderGraph:
    from .encoder_graph import read_graph

    return read_graph(vae)


def _read_qwen_image(vae: Any) -> EncoderGraph:
    from .encoder_graph import read_qwen_image_graph

    return read_qwen_image_graph(vae)


def _encode(
    run: Run,
    vae: Any,
    videos: Any,
    device: torch.device | str,
    tiled: bool = False,
    *_: object,
    **__: object,
) -> Any:
    """Videos one by one, as DiffSynth does, each on all ranks; the result is on the CPU if DiffSynth blends there."""
    import torch

    from wanshim.core.decoding import sequence_group

    from .encoder_graph import normalise

    latents = []
    for video in videos:
        encoded = run(vae, video.unsqueeze(0).to(device), group=sequence_group(GROUPS), lean=bool(tiled))
        latent = normalise(vae, encoded)
        latents.append((latent.cpu() if tiled else latent).squeeze(0))
    return torch.stack(latents)


def _encode_image(run: Run, vae: Any, x: torch.Tensor, tiled: bool = False, *_: object, **__: object) -> Any:
    from .decoder_graph import has_tiles

    return _qwen_image(run, vae, x.unsqueeze(2), lean=has_tiles(vae, tiled)).squeeze(2)


def _encode_video(run: Run, vae: Any, x: torch.Tensor, **_: object) -> Any:
    return _qwen_image(run, vae, x, lean=False)


def _qwen_image(run: Run, vae: Any, x: torch.Tensor, *, lean: bool) -> Any:
    from wanshim.core.decoding import sequence_group

    from .encoder_graph import normalise_qwen_image

    return normalise_qwen_image(vae, run(vae, x, group=sequence_group(GROUPS), lean=lean))


def _seam(
    target: str, call: Callable[..., Any], read: Callable[[Any], EncoderGraph], *, required: bool = False
) -> Seam:
    return Seam(
        target,
        replace_method(call, read, verb="encode"),
        required=required,
        closure_because="a user who compiles the VAE reaches it; DiffSynth compiles the DiT alone",
        why="every rank encodes the whole video or image; tiled=True repeats the overlaps and leaves seams",
        upstream="https://github.com/modelscope/DiffSynth-Studio (no parallel VAE as of 2.1.12)",
        remove_when="this VAE shares its encode in a USP job without changing its output",
    )


FEATURE = Feature(
    name="diffsynth.vae_encode",
    summary="Wan and Qwen-Image VAE encode shared by all ranks of a torchrun or USP job",
    switched_on_by="vae_encode",
    relies_on=ENCODER,
    seams=(
        _seam(f"{WAN}:WanVideoVAE.encode", _encode, _read, required=True),
        _seam(f"{QWEN_IMAGE}:QwenImageVAE.encode", _encode_image, _read_qwen_image),
        _seam(f"{QWEN_IMAGE}:QwenImageVAE.encode_video", _encode_video, _read_qwen_image),  # DiffSynth 2.1.10 and later
    ),
)
