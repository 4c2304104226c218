"""The encoders of FastVideo's VAEs, bound to the core; see `decoder_graph.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .wan_forks import FORKS, Fork

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, EncoderGraph


def build(vae: Any) -> Binding:
    """Bind the core to `vae.encode`, which returns a distribution.

    Raises:
        VaeInvalid: the VAE was loaded without its encoder, or that is not built as the releases this adapter knows
            build it.
    """
    from wanshim.core.decoding import Binding
    from wanshim.errors import VaeInvalid

    if not hasattr(vae, "encoder"):
        raise VaeInvalid("this VAE was loaded without its encoder", expected="load_encoder=True in its configuration")
    return Binding(graph=read(vae), target=vae, methods={"encode": _replace})


def read(vae: Any) -> EncoderGraph:
    from wanshim.core.decoding import read_encoder

    return read_encoder(vae, own=lambda vae, video: vae.encode(video).parameters)


def _replace(encode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def _encode(x: torch.Tensor) -> Any:
        return distribution(encode(x))

    return _encode


def distribution(encoded: torch.Tensor | None) -> Any:
    from fastvideo.models.vaes.common import DiagonalGaussianDistribution

    return DiagonalGaussianDistribution(encoded)


def build_fork(fork: Fork, vae: Any) -> Binding:
    from wanshim.core.decoding import Binding

    def replace(encode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def _encode(x: torch.Tensor) -> Any:
            return original(x) if fork.refuses(vae, x.shape[2]) else fork.encode(vae, encode, x)

        return _encode

    return Binding(graph=fork.read_encoder(vae), target=vae, methods={"encode": replace})


BUILDERS = {
    "fastvideo.models.vaes.wanvae.AutoencoderKLWan": build,
    **{f"{fork.module}.{fork.name}": partial(build_fork, fork) for fork in FORKS},
}
