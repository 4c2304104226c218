"""The encoders of diffusers' `AutoencoderKLWan`, both layouts, and `AutoencoderKLQwenImage`, bound to the core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .decoder_graph import taken

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding

log = logging.getLogger("wanshim")


def build(vae: Any) -> Binding:
    """Bind the core to `vae._encode`, which `encode` calls, once per sample when slicing is on.

    Raises:
        VaeInvalid: the encoder is not built as the releases this adapter knows build it, or another library encodes
            with it in parallel already.
    """
    from wanshim.core.decoding import Binding, read_encoder
    from wanshim.errors import VaeInvalid

    holder = taken(vae, "encode")
    if holder is not None:
        raise VaeInvalid(
            f"{type(vae).__qualname__}: {holder}",
            expected="a VAE that nobody else uses in parallel",
            hint="Switch the other one off for the VAE to use this one; its encode is left as it was",
        )
    return Binding(graph=read_encoder(vae), target=vae, methods={"_encode": partial(_replace, vae)})


def _replace(vae: Any, encode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    said: set[str] = set()

    def _encode(x: torch.Tensor) -> Any:
        holder = taken(vae, "encode")
        if holder is not None:  # it came after us, and would wait in vain for its own method to be called
            if holder not in said:
                said.add(holder)
                log.warning("wanshim: parallelize_encode: the encode is left to diffusers: %s", holder)
            return original(x)
        return encode(x, lean=bool(vae.use_tiling))

    return _encode


_MODULES = "diffusers.models.autoencoders"
BUILDERS = {
    f"{_MODULES}.autoencoder_kl_wan.AutoencoderKLWan": build,
    f"{_MODULES}.autoencoder_kl_qwenimage.AutoencoderKLQwenImage": build,
}
