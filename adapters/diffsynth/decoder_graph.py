"""DiffSynth's `WanVideoVAE` and `WanVideoVAE38`, bound to the core.

Under DiffSynth's VRAM management every module sits in a wrapper that moves or casts it per call; the graph then asks
the wrapper for the module at each use, as the wrapper's own forward does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, DecoderGraph, ModuleReader


def build(vae: Any) -> Binding:
    """Bind the core to `vae.model.decode(z, scale)`, which takes normalised latents and does not clamp.

    Raises:
        VaeInvalid: the decoder is not built as the releases this adapter knows build it.
    """
    from wanshim.core.decoding import Binding

    graph = read_graph(vae)
    replace = partial(_replace, vae)
    return Binding(graph=graph, target=vae, attribute="single_decode", replace=replace, entry="decode")


def _replace(vae: Any, decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def single_decode(hidden_state: torch.Tensor, device: torch.device | str) -> Any:
        frames = decode(denormalise(vae, hidden_state.to(device)))
        return hidden_state.new_empty(0) if frames is None else frames

    return single_decode


def denormalise(vae: Any, z: torch.Tensor) -> Any:
    """Latents as the decoder reads them, with the arithmetic of `VideoVAE_.decode`."""
    mean, inverse = (value.to(dtype=z.dtype, device=z.device).view(1, -1, 1, 1, 1) for value in vae.scale)
    return z / inverse + mean


def read_graph(vae: Any) -> DecoderGraph:
    from wanshim.core.decoding import read_wan_graph

    return read_wan_graph(vae, vae.model, modules=module_reader())


def module_reader() -> ModuleReader:
    from wanshim.core.decoding import ModuleReader

    return ModuleReader(unwrap=_unwrap)


def _unwrap(module: Any) -> tuple[Any, Callable[[], torch.nn.Module] | None]:
    """What is inside a wrapper of DiffSynth's VRAM management, if it is one."""
    return (module.module, module.computation) if hasattr(module, "computation") else (module, None)


BUILDERS = {"diffsynth.models.wan_video_vae.WanVideoVAE": build}
