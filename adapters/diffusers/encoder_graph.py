"""The encoders of diffusers' `AutoencoderKLWan`, both layouts, and `AutoencoderKLQwenImage`, bound to the core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .decoder_graph import CLASSES, check_free, unless_taken, untiled

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, EncoderGraph


def build(vae: Any) -> Binding:
    """Bind the core to `vae._encode`, which `encode` calls, once per sample when slicing is on.

    Raises:
        VaeInvalid: the encoder is not built as the releases this adapter knows build it, or another library encodes
            with it in parallel already.
    """
    from wanshim.core.decoding import Binding

    check_free(vae, "encode")
    return Binding(graph=read(vae), target=vae, methods={"_encode": partial(_replace, vae)})


def read(vae: Any) -> EncoderGraph:
    from wanshim.core.decoding import read_encoder

    return read_encoder(vae, own=_own)


def _own(vae: Any, video: torch.Tensor) -> Any:
    with untiled(vae):
        return vae._encode(video)


def _replace(vae: Any, encode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return unless_taken(vae, "encode", lambda x: encode(x, lean=bool(vae.use_tiling)), original)


BUILDERS = dict.fromkeys(CLASSES, build)
