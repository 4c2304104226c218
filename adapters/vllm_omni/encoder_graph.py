"""The encoders of vLLM-Omni's Wan and Qwen-Image VAEs, bound to the core; see `decoder_graph.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .decoder_graph import CLASSES, untiled

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, EncoderGraph


def build(vae: Any) -> Binding:
    """Bind the core to `vae._encode`, in place of the tile executor behind it.

    Raises:
        VaeInvalid: the encoder is not built as the releases this adapter knows build it.
    """
    from wanshim.core.decoding import Binding, read_encoder

    graph = read_encoder(vae, own=lambda vae, x: untiled(vae, vae._encode, x))
    return Binding(graph=graph, target=vae, methods={"_encode": partial(_replace, vae)})


def _replace(vae: Any, encode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def _encode(x: torch.Tensor) -> Any:
        return encode(x, lean=bool(vae.use_tiling))

    return _encode


def read_patched_graph(vae: Any) -> EncoderGraph:
    """The encoder as `tiled_encode` has it, which is given patches in place of pixels."""
    from wanshim.core.decoding import read_encoder

    return replace(read_encoder(vae, own=_encode_patches), patch_size=1)


def _encode_patches(vae: Any, patches: torch.Tensor) -> torch.Tensor:
    """vLLM-Omni's own encode of a whole video, given as patches."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    size = getattr(vae.config, "patch_size", None)
    encoded: torch.Tensor = untiled(vae, vae._encode, patches if size is None else unpatchify(patches, size))
    return encoded


BUILDERS = dict.fromkeys(CLASSES, build)
