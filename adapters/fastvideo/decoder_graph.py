"""FastVideo's own `AutoencoderKLWan`, both layouts, and its VAEs of Cosmos 2.5 and LingBot-World, bound to the core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .wan_forks import FORKS, Fork

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, DecoderGraph


def build(vae: Any) -> Binding:
    """Bind the core to `vae.decode`, which returns fp32 frames.

    Raises:
        VaeInvalid: the decoder is not built as the releases this adapter knows build it, or is the light VAE,
            which upsamples the first frame in time too.
    """
    from wanshim.core.decoding import Binding
    from wanshim.errors import VaeInvalid

    if getattr(vae.config, "use_light_vae", False):
        raise VaeInvalid(
            "this VAE is FastVideo's light VAE", expected="the Wan 2.1 or 2.2 VAE", hint="Its decode is left as it was"
        )
    return Binding(graph=read(vae), target=vae, methods={"decode": _replace})


def read(vae: Any) -> DecoderGraph:
    import torch

    from wanshim.core.decoding import read_graph

    return read_graph(vae, output_dtype=torch.float32, own=lambda vae, z: vae.decode(z))


def _replace(decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def _decode(z: torch.Tensor) -> Any:
        frames = decode(z)
        return z.new_empty(0) if frames is None else frames

    return _decode


def build_fork(fork: Fork, vae: Any) -> Binding:
    from wanshim.core.decoding import Binding

    def replace(decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        return partial(fork.decode, vae, decode)

    return Binding(graph=fork.read_decoder(vae), target=vae, methods={"decode": replace})


BUILDERS = {
    "fastvideo.models.vaes.wanvae.AutoencoderKLWan": build,
    **{f"{fork.module}.{fork.name}": partial(build_fork, fork) for fork in FORKS},
}
