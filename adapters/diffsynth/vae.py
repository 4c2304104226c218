"""In a torchrun or USP job all ranks decode and encode their share of the video.

DiffSynth decodes and encodes the whole video on every rank; `tiled=True`, its pipelines' default, does up to three
times the work and blends on the CPU. Here the methods of its VAEs go to the decode room. A caller that asks for tiles
gets the exact plan with the least memory: memory stays bounded and there are no seams. WANSHIM_VAE_MODE and
WANSHIM_VAE_ENCODE pick the mode, WANSHIM_VAE_FAST=1 the fast operators. The ranks of a group share the encode of a
video that all of them hold, in a pipeline or in a training step. Ranks that hold different videos, as in data-parallel
training and `sft:data_process`, each encode their own with DiffSynth and do not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import SharedCall, replace_method

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Graph

WAN = "diffsynth.models.wan_video_vae"
QWEN_IMAGE = "diffsynth.models.qwen_image_vae"
GROUPS = "xfuser.core.distributed.parallel_state"  # of a USP job
WAN_BLOCKS = ("ResidualBlock", "AttentionBlock", "Resample", "CausalConv3d", "RMS_norm")
QWEN_IMAGE_BLOCKS = ("MidBlock", *WAN_BLOCKS)
# The code that the decode room computes instead: a release in which it differs is not patched.
COMPUTED = {
    "decode": (
        f"{WAN}:WanVideoVAE.single_decode",
        f"{WAN}:VideoVAE_.decode",
        f"{WAN}:VideoVAE38_.decode",
        f"{WAN}:unpatchify",
        *(
            f"{WAN}:{n}.forward"
            for n in ("Decoder3d", "Decoder3d_38", "Up_ResidualBlock", "Upsample", "DupUp3D", *WAN_BLOCKS)
        ),
        *(f"{QWEN_IMAGE}:QwenImage{n}.forward" for n in ("Decoder3d", "UpBlock", "Upsample", *QWEN_IMAGE_BLOCKS)),
    ),
    "encode": (
        f"{WAN}:WanVideoVAE.single_encode",
        f"{WAN}:VideoVAE_.encode",
        f"{WAN}:VideoVAE38_.encode",
        f"{WAN}:patchify",
        *(f"{WAN}:{n}.forward" for n in ("Encoder3d", "Encoder3d_38", "Down_ResidualBlock", "AvgDown3D", *WAN_BLOCKS)),
        *(f"{QWEN_IMAGE}:QwenImage{n}.forward" for n in ("Encoder3d", *QWEN_IMAGE_BLOCKS)),
    ),
}


def _read(name: str, verb: str, vae: Any) -> Graph:
    """What the function `name` of `decoder_graph` or `encoder_graph` makes of a VAE."""
    return getattr(import_module(f"{__package__}.{verb}r_graph"), name)(vae)  # type: ignore[no-any-return]


def _wan(
    verb: str,
    run: SharedCall,
    vae: Any,
    given: Any,
    device: torch.device | str,
    tiled: bool = False,
    *_: object,
    **__: object,
) -> Any:
    """Videos one by one, as DiffSynth does, each on all ranks; the result is on the CPU if DiffSynth blends there."""
    import torch

    from wanshim.core.decoding import sequence_group

    from .decoder_graph import denormalise
    from .encoder_graph import normalise

    shared = partial(run, vae, group=sequence_group(GROUPS), lean=bool(tiled))
    results = []
    for one in given:
        one = one.unsqueeze(0).to(device)
        result = normalise(vae, shared(one)) if verb == "encode" else shared(denormalise(vae, one))
        results.append((result.cpu() if tiled else result).squeeze(0))
    return torch.stack(results)


def _qwen_image(
    verb: str, run: SharedCall, vae: Any, x: torch.Tensor, tiled: bool = False, *_: object, **__: object
) -> Any:
    from .decoder_graph import has_tiles

    return _qwen_video(verb, run, vae, x.unsqueeze(2), lean=has_tiles(vae, tiled)).squeeze(2)


def _qwen_video(verb: str, run: SharedCall, vae: Any, x: torch.Tensor, *, lean: bool = False, **_: object) -> Any:
    from wanshim.core.decoding import sequence_group

    from .decoder_graph import denormalise_qwen_image
    from .encoder_graph import normalise_qwen_image

    shared = partial(run, vae, group=sequence_group(GROUPS), lean=lean)
    return normalise_qwen_image(vae, shared(x)) if verb == "encode" else shared(denormalise_qwen_image(vae, x))


def _feature(verb: str, switched_on_by: str, tiles: str) -> Feature:
    def seam(target: str, call: Callable[..., Any], read: str, *, required: bool = False) -> Seam:
        return Seam(
            target,
            replace_method(partial(call, verb), partial(_read, read, verb), verb=verb),
            required=required,
            closure_because="a user who compiles the VAE reaches it; DiffSynth compiles the DiT alone",
            why=f"every rank {verb}s the whole video or image; tiled=True repeats {tiles} and leaves seams",
            upstream="https://github.com/modelscope/DiffSynth-Studio (no parallel VAE as of 2.1.12)",
            remove_when=f"this VAE shares its {verb} in a USP job without changing its output",
        )

    return Feature(
        name=f"diffsynth.vae_{verb}",
        summary=f"Wan and Qwen-Image VAE {verb} shared by all ranks of a torchrun or USP job",
        switched_on_by=switched_on_by,
        relies_on=COMPUTED[verb],
        seams=(
            seam(f"{WAN}:WanVideoVAE.{verb}", _wan, "read_graph", required=True),
            seam(f"{QWEN_IMAGE}:QwenImageVAE.{verb}", _qwen_image, "read_qwen_image_graph"),
            # of DiffSynth 2.1.10 and later
            seam(f"{QWEN_IMAGE}:QwenImageVAE.{verb}_video", _qwen_video, "read_qwen_image_graph"),
        ),
    )


FEATURES = (
    _feature("decode", "vae_mode", "three times the work"),
    _feature("encode", "vae_encode", "the overlaps"),
)
