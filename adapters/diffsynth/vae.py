"""In a torchrun or USP job all ranks decode and encode their share of the video.

DiffSynth decodes and encodes the whole video on every rank; `tiled=True`, its pipelines' default, does up to three
times the work and blends on the CPU. Here the methods of its VAEs go to the decode room. A caller that asks for tiles
gets the exact plan with the least memory: memory stays bounded and there are no seams. WANSHIM_VAE_MODE and
WANSHIM_VAE_ENCODE pick the mode, WANSHIM_VAE_FAST=1 the fast operators. The ranks of a group share the encode of a
video that all of them hold, in a pipeline or in a training step. Ranks that hold different videos, as in data-parallel
training and `sft:data_process`, each encode their own with DiffSynth and do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Seam
from wanshim.patching.vae_method import replace_method

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, Call, Graph

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


def _read(verb: str, vae: Any) -> Graph:
    from wanshim.core.decoding import ModuleReader, read_wan_graph

    own = _own_latents if verb == "encode" else _own_frames
    return read_wan_graph(vae, vae.model, verb, modules=ModuleReader(unwrap=_unwrap), own=own)


def _own_frames(vae: Any, z: torch.Tensor) -> Any:
    return vae.model.decode(z, _unscaled(vae)).clamp_(-1, 1)


def _own_latents(vae: Any, video: torch.Tensor) -> Any:
    return vae.model.encode(video, _unscaled(vae))  # the means alone


def _unscaled(vae: Any) -> list[torch.Tensor]:
    """A scale that leaves latents as they are."""
    import torch

    return [torch.zeros(vae.z_dim), torch.ones(vae.z_dim)]


def _read_qwen_image(verb: str, vae: Any) -> Graph:
    from wanshim.core.decoding import ModuleReader, read_graph

    own = _own_qwen_latents if verb == "encode" else _own_qwen_frames
    return read_graph(vae, verb, clamped=False, modules=ModuleReader(unwrap=_unwrap), own=own)


def _own_qwen_frames(vae: Any, z: torch.Tensor) -> Any:
    if z.shape[2] > 1:
        return type(vae).decode_video(_without_scale(vae), z)
    return vae.decoder(vae.post_quant_conv(z))


def _own_qwen_latents(vae: Any, x: torch.Tensor) -> Any:
    if x.shape[2] > 1:
        return type(vae).encode_video(_without_scale(vae), x)  # the means alone
    return vae.quant_conv(vae.encoder(x))


def _without_scale(vae: Any) -> Any:
    """The modules of a QwenImageVAE with a scale that leaves latents as they are."""
    import torch

    bare = object.__new__(type(vae))
    bare.__dict__.update(vars(vae), mean=torch.zeros_like(vae.mean), std=torch.ones_like(vae.std))
    return bare


def _unwrap(module: Any) -> tuple[Any, Callable[[], torch.nn.Module] | None]:
    """The module inside a wrapper of DiffSynth's VRAM management, which moves or casts it per call, if it is one."""
    return (module.module, module.computation) if hasattr(module, "computation") else (module, None)


def _normalised(verb: str, call: Call, given: torch.Tensor, scale: Sequence[torch.Tensor]) -> torch.Tensor:
    """Frames of normalised latents, or normalised means of a video, with DiffSynth's arithmetic.

    Args:
        scale: mean and inverse deviation of the latents.
    """
    x = call(given).chunk(2, dim=1)[0] if verb == "encode" else given
    mean, inverse = (value.to(dtype=x.dtype, device=x.device) for value in scale)
    return (x - mean) * inverse if verb == "encode" else call(x / inverse + mean)


def _own_method(verb: str, vae: Any) -> str | None:
    """A method that the core stands in for and that is not DiffSynth's: of a subclass, or put over it."""
    for owner, name in ((vae, f"single_{verb}"), (vae, f"tiled_{verb}"), (vae.model, verb)):
        method = getattr(owner, name)
        function = getattr(method, "__func__", method)
        module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
        if module.split(".")[0] not in ("diffsynth", "wanshim"):
            return f"{module} brings its own {name}"
    return None


def _single(verb: str, call: Call, vae: Any, given: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    from wanshim.core.decoding import VaeFallback

    if (own := _own_method(verb, vae)) is not None:
        raise VaeFallback(own)
    return _normalised(verb, call, given.to(device), [value.view(1, -1, 1, 1, 1) for value in vae.scale])


def _wan(
    verb: str,
    call: Call,
    vae: Any,
    given: Any,
    device: torch.device | str,
    tiled: bool = False,
    tile_size: object = None,
    tile_stride: object = None,
) -> torch.Tensor:
    """Videos one by one, as DiffSynth does, each on all ranks; the result is on the CPU if DiffSynth blends there."""
    import torch

    from wanshim.core.decoding import VaeFallback

    if isinstance(given, Iterator):  # DiffSynth, if it computes one of them, wants to read them all
        raise VaeFallback(f"the {verb} was given an iterator, which can be read once")
    if f"single_{verb}" in vars(vae) and _own_method(verb, vae) is None:
        raise VaeFallback(f"parallelize_{verb} has this VAE")
    results = (_single(verb, partial(call, lean=bool(tiled)), vae, one.unsqueeze(0), device) for one in given)
    return torch.stack([(result.cpu() if tiled else result).squeeze(0) for result in results])


def _qwen_image(
    verb: str, call: Call, vae: Any, x: torch.Tensor, tiled: bool = False, *_: object, **__: object
) -> torch.Tensor:
    """Releases before 2.1.0 accept `tiled` for a QwenImageVAE and compute it whole."""
    lean = tiled and hasattr(vae, "tiled_forward")
    result = _qwen_video(verb, partial(call, lean=lean), vae, x.unsqueeze(2))
    return result.squeeze(2) if result.numel() else result


def _qwen_video(verb: str, call: Call, vae: Any, x: torch.Tensor, **_: object) -> torch.Tensor:
    return _normalised(verb, call, x, (vae.mean, vae.std))


def _bind(verb: str, vae: Any) -> Binding:
    """The core in what `decode` and `encode` call for each video without tiles.

    Raises:
        ModelInvalid: the VAE is not built as the releases this adapter knows build it, or has methods of its own.
    """
    from wanshim.core.decoding import Binding
    from wanshim.errors import ModelInvalid

    if (own := _own_method(verb, vae)) is not None:
        raise ModelInvalid(
            f"{type(vae).__qualname__}: {own}",
            expected=f"a VAE that {verb}s as DiffSynth does",
            hint=f"Its {verb} is left as it was",
        )
    single, around = {f"single_{verb}": partial(_single, verb)}, partial(_wan, verb)
    return Binding(graph=_read(verb, vae), target=vae, methods=single, entry=verb, around=around)


def _bind_qwen_image(verb: str, vae: Any) -> Binding:
    """The core in `decode` or `encode`, which take images, and in those of videos where the release has them.

    Raises:
        ModelInvalid: the VAE is not built as the releases this adapter knows build it.
    """
    from wanshim.core.decoding import Binding

    methods = {verb: partial(_qwen_image, verb), f"{verb}_video": partial(_qwen_video, verb)}
    known = {name: method for name, method in methods.items() if hasattr(vae, name)}
    return Binding(graph=_read_qwen_image(verb, vae), target=vae, methods=known)


BINDERS = {f"{WAN}.WanVideoVAE": _bind, f"{QWEN_IMAGE}.QwenImageVAE": _bind_qwen_image}


def _ranks(vae: Any) -> dict[str, Any]:
    from wanshim.core.decoding import sequence_group

    return {"group": sequence_group(GROUPS)}


def _feature(verb: str, switched_on_by: str, tiles: str) -> Feature:
    def seam(target: str, compute: Callable[..., Any], read: Callable[..., Graph], *, required: bool = False) -> Seam:
        return Seam(
            target,
            replace_method(partial(compute, verb), partial(read, verb), ranks=_ranks, verb=verb),
            required=required,
            closure_because="a user who compiles the VAE reaches it; DiffSynth compiles the DiT alone",
            why=f"every rank {verb}s the whole video or image; tiled=True repeats {tiles} and leaves seams",
            upstream="https://github.com/modelscope/DiffSynth-Studio (no parallel VAE as of 2.1.12)",
            remove_when=f"this VAE shares its {verb} in a USP job without changing its output",
        )

    return Feature(
        name=f"diffsynth.vae_{verb}",
        summary=f"Wan and Qwen-Image VAE {verb} with fewer kernels, or shared by all ranks of a torchrun or USP job",
        switched_on_by=switched_on_by,
        auto_with="generate",
        relies_on=COMPUTED[verb],
        seams=(
            seam(f"{WAN}:WanVideoVAE.{verb}", _wan, _read, required=True),
            seam(f"{QWEN_IMAGE}:QwenImageVAE.{verb}", _qwen_image, _read_qwen_image),
            # of DiffSynth 2.1.10 and later
            seam(f"{QWEN_IMAGE}:QwenImageVAE.{verb}_video", _qwen_video, _read_qwen_image),
        ),
    )


FEATURES = (
    _feature("decode", "vae_mode", "three times the work"),
    _feature("encode", "vae_encode", "the overlaps"),
)
