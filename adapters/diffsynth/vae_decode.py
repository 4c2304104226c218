"""`diffsynth.vae_decode`: in a torchrun or USP job all ranks decode their share of the video.

DiffSynth decodes the whole video on every rank, and `tiled=True`, its pipelines' default, does three times the work
and blends on the CPU. Here `WanVideoVAE.decode` goes to the decode room. A caller that asks for tiles gets the exact
plan with the least memory: memory stays bounded and there are no seams. WANSHIM_VAE_MODE picks the mode,
WANSHIM_VAE_FAST=1 the fast operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import Run, replace_method

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import DecoderGraph

WAN = "diffsynth.models.wan_video_vae"
QWEN_IMAGE = "diffsynth.models.qwen_image_vae"
GROUPS = "xfuser.core.distributed.parallel_state"  # of a USP job
# The code that the decode room computes instead: a release in which it differs is not patched.
DECODER = (
    f"{WAN}:WanVideoVAE.single_decode",
    f"{WAN}:VideoVAE_.decode",
    f"{WAN}:VideoVAE38_.decode",
    f"{WAN}:Decoder3d.forward",
    f"{WAN}:Decoder3d_38.forward",
    f"{WAN}:Up_ResidualBlock.forward",
    f"{WAN}:ResidualBlock.forward",
    f"{WAN}:AttentionBlock.forward",
    f"{WAN}:Resample.forward",
    f"{WAN}:Upsample.forward",
    f"{WAN}:CausalConv3d.forward",
    f"{WAN}:RMS_norm.forward",
    f"{WAN}:DupUp3D.forward",
    f"{WAN}:unpatchify",
    f"{QWEN_IMAGE}:QwenImageDecoder3d.forward",
    f"{QWEN_IMAGE}:QwenImageMidBlock.forward",
    f"{QWEN_IMAGE}:QwenImageUpBlock.forward",
    f"{QWEN_IMAGE}:QwenImageResidualBlock.forward",
    f"{QWEN_IMAGE}:QwenImageAttentionBlock.forward",
    f"{QWEN_IMAGE}:QwenImageResample.forward",
    f"{QWEN_IMAGE}:QwenImageUpsample.forward",
    f"{QWEN_IMAGE}:QwenImageCausalConv3d.forward",
    f"{QWEN_IMAGE}:QwenImageRMS_norm.forward",
)


def _read(vae: Any) -> DecoderGraph:
    from .decoder_graph import read_graph

    return read_graph(vae)


def _read_qwen_image(vae: Any) -> DecoderGraph:
    from .decoder_graph import read_qwen_image_graph

    return read_qwen_image_graph(vae)


def _decode(
    run: Run,
    vae: Any,
    hidden_states: torch.Tensor,
    device: torch.device | str,
    tiled: bool = False,
    *_: object,
    **__: object,
) -> Any:
    """Videos one by one, as DiffSynth does, each on all ranks; the result is on the CPU if DiffSynth blends there."""
    import torch

    from wanshim.core.decoding import sequence_group

    from .decoder_graph import denormalise

    videos = []
    for hidden_state in hidden_states:
        latent = denormalise(vae, hidden_state.unsqueeze(0).to(device))
        frames = run(vae, latent, group=sequence_group(GROUPS), lean=bool(tiled))
        videos.append((frames.cpu() if tiled else frames).squeeze(0))
    return torch.stack(videos)


def _decode_image(run: Run, vae: Any, x: torch.Tensor, tiled: bool = False, *_: object, **__: object) -> Any:
    from .decoder_graph import has_tiles

    return _qwen_image(run, vae, x.unsqueeze(2), lean=has_tiles(vae, tiled)).squeeze(2)


def _decode_video(run: Run, vae: Any, x: torch.Tensor, **_: object) -> Any:
    return _qwen_image(run, vae, x, lean=False)


def _qwen_image(run: Run, vae: Any, x: torch.Tensor, *, lean: bool) -> Any:
    from wanshim.core.decoding import sequence_group

    from .decoder_graph import denormalise_qwen_image

    return run(vae, denormalise_qwen_image(vae, x), group=sequence_group(GROUPS), lean=lean)


def _seam(
    target: str, call: Callable[..., Any], read: Callable[[Any], DecoderGraph], *, required: bool = False
) -> Seam:
    return Seam(
        target,
        replace_method(call, read),
        required=required,
        closure_because="a user who compiles the VAE reaches it; DiffSynth compiles the DiT alone",
        why="every rank decodes the whole video or image; tiled=True repeats three times the work and leaves seams",
        upstream="https://github.com/modelscope/DiffSynth-Studio (no parallel VAE as of 2.1.12)",
        remove_when="this VAE shares its decode in a USP job without changing its output",
    )


FEATURE = Feature(
    name="diffsynth.vae_decode",
    summary="Wan and Qwen-Image VAE decode shared by all ranks of a torchrun or USP job",
    switched_on_by="vae_mode",
    relies_on=DECODER,
    seams=(
        _seam(f"{WAN}:WanVideoVAE.decode", _decode, _read, required=True),
        _seam(f"{QWEN_IMAGE}:QwenImageVAE.decode", _decode_image, _read_qwen_image),
        _seam(f"{QWEN_IMAGE}:QwenImageVAE.decode_video", _decode_video, _read_qwen_image),  # DiffSynth 2.1.10 and later
    ),
)
