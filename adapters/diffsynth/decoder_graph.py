"""DiffSynth's `WanVideoVAE`, `WanVideoVAE38` and `QwenImageVAE`, bound to the core.

Under DiffSynth's VRAM management every module sits in a wrapper that moves or casts it per call; the graph then asks
the wrapper for the module at each use, as the wrapper's own forward does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wanshim.core.decoding import Binding, DecoderGraph, ModuleReader, read_wan_graph


def build(vae: Any) -> Binding:
    """Bind the core to `vae.model.decode(z, scale)`, which takes normalised latents and does not clamp.

    Raises:
        VaeInvalid: the decoder is not built as the releases this adapter knows build it.
    """
    graph = read_graph(vae)
    replace = partial(_replace, vae)
    return Binding(graph=graph, target=vae, methods={"single_decode": replace}, entry="decode")


def _replace(vae: Any, decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def single_decode(hidden_state: torch.Tensor, device: torch.device | str) -> Any:
        frames = decode(denormalise(vae, hidden_state.to(device)))
        return hidden_state.new_empty(0) if frames is None else frames

    return single_decode


def denormalise(vae: Any, z: torch.Tensor) -> Any:
    """Latents as the decoder reads them, with the arithmetic of `VideoVAE_.decode`."""
    mean, inverse = (value.to(dtype=z.dtype, device=z.device).view(1, -1, 1, 1, 1) for value in vae.scale)
    return z / inverse + mean


def build_qwen_image(vae: Any) -> Binding:
    """Bind the core to `vae.decode`, which takes images, and to `vae.decode_video` where the release has it.

    Raises:
        VaeInvalid: the decoder is not built as the releases this adapter knows build it.
    """

    def whole(decode: Callable[..., Any], z: torch.Tensor, **lean: bool) -> Any:
        return decode(denormalise_qwen_image(vae, z), **lean)

    return Binding(graph=read_qwen_image_graph(vae), target=vae, methods=qwen_image_methods(vae, "decode", whole))


def qwen_image_methods(vae: Any, verb: str, whole: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """What makes the methods of a QwenImageVAE.

    Args:
        whole: called with the core's decode or encode, (b, c, f, h, w) and `lean`; None on a rank that gets no result.
    """

    def of_images(compute: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def method(x: torch.Tensor, tiled: bool = False, *_: object, **__: object) -> Any:
            result = whole(compute, x.unsqueeze(2), lean=has_tiles(vae, tiled))
            return x.new_empty(0) if result is None else result.squeeze(2)

        return method

    def of_videos(compute: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def method(x: torch.Tensor, **_: object) -> Any:
            result = whole(compute, x)
            return x.new_empty(0) if result is None else result

        return method

    methods = {verb: of_images, f"{verb}_video": of_videos}
    return {name: replace for name, replace in methods.items() if hasattr(vae, name)}


def denormalise_qwen_image(vae: Any, z: torch.Tensor) -> Any:
    """Latents as the decoder reads them, with the arithmetic of `QwenImageVAE.decode`."""
    mean, inverse = (value.to(dtype=z.dtype, device=z.device) for value in (vae.mean, vae.std))
    return z / inverse + mean


def has_tiles(vae: Any, tiled: bool) -> bool:
    """Releases before 2.1.0 accept `tiled` for a QwenImageVAE and compute it whole."""
    return tiled and hasattr(vae, "tiled_forward")


def read_qwen_image_graph(vae: Any) -> DecoderGraph:
    from wanshim.core import decoding

    return decoding.read_graph(vae, clamped=False, modules=module_reader(), own=_own_image)


def _own_image(vae: Any, z: torch.Tensor) -> Any:
    if z.shape[2] > 1:
        return type(vae).decode_video(without_scale(vae), z)
    return vae.decoder(vae.post_quant_conv(z))


def without_scale(vae: Any) -> Any:
    """The modules of a QwenImageVAE with a scale that leaves latents as they are."""
    bare = object.__new__(type(vae))
    bare.__dict__.update(vars(vae), mean=torch.zeros_like(vae.mean), std=torch.ones_like(vae.std))
    return bare


def read_graph(vae: Any) -> DecoderGraph:
    return read_wan_graph(vae, vae.model, modules=module_reader(), own=_own)


def _own(vae: Any, z: torch.Tensor) -> Any:
    return vae.model.decode(z, unscaled(vae)).clamp_(-1, 1)


def unscaled(vae: Any) -> list[torch.Tensor]:
    """A scale that leaves latents as they are."""
    return [torch.zeros(vae.z_dim), torch.ones(vae.z_dim)]


def module_reader() -> ModuleReader:
    return ModuleReader(unwrap=_unwrap)


def _unwrap(module: Any) -> tuple[Any, Callable[[], torch.nn.Module] | None]:
    """What is inside a wrapper of DiffSynth's VRAM management, if it is one."""
    return (module.module, module.computation) if hasattr(module, "computation") else (module, None)


BUILDERS = {
    "diffsynth.models.wan_video_vae.WanVideoVAE": build,
    "diffsynth.models.qwen_image_vae.QwenImageVAE": build_qwen_image,
}
