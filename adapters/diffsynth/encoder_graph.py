"""The encoders of DiffSynth's `WanVideoVAE` and `WanVideoVAE38`, bound to the core; see `decoder_graph.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .decoder_graph import module_reader

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, EncoderGraph


def build(vae: Any) -> Binding:
    """Bind the core to `vae.single_encode`, which returns normalised means.

    Raises:
        VaeInvalid: the encoder is not built as the releases this adapter knows build it.
    """
    from wanshim.core.decoding import Binding

    return Binding(graph=read_graph(vae), target=vae, attribute="single_encode", replace=partial(_replace, vae))


def _replace(vae: Any, encode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def single_encode(video: torch.Tensor, device: torch.device | str) -> Any:
        return normalise(vae, encode(video.to(device)))

    return single_encode


def normalise(vae: Any, encoded: torch.Tensor) -> Any:
    """Latents from the encoder's output, with the arithmetic of `VideoVAE_.encode`."""
    mean = encoded.chunk(2, dim=1)[0]
    shift, scale = (value.to(dtype=mean.dtype, device=mean.device).view(1, -1, 1, 1, 1) for value in vae.scale)
    return (mean - shift) * scale


def read_graph(vae: Any) -> EncoderGraph:
    from wanshim.core.decoding import read_wan_encoder

    return read_wan_encoder(vae, vae.model, modules=module_reader())


BUILDERS = {"diffsynth.models.wan_video_vae.WanVideoVAE": build}
