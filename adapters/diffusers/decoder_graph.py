"""diffusers' `AutoencoderKLWan`, both layouts, bound to the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wanshim.core.decoding import Binding


def build(vae: Any) -> Binding:
    """Bind the core to `vae._decode`, which `decode` calls, once per sample when slicing is on.

    Raises:
        DecodeInvalid: the decoder is not built as the releases this adapter knows build it.
    """
    from wanshim.core.decoding import Binding, read_graph

    return Binding(graph=read_graph(vae), target=vae, attribute="_decode", replace=lambda *a: _replace(vae, *a))


def _replace(vae: Any, decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    from diffusers.models.autoencoders.vae import DecoderOutput

    from wanshim.core.decoding import TileSettings

    def _decode(z: Any, return_dict: bool = True) -> Any:
        sample = decode(z, tiles=TileSettings.of(vae), lean=bool(vae.use_tiling))
        sample = z.new_empty(0) if sample is None else sample
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    return _decode
