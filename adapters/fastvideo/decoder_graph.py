"""FastVideo's own `AutoencoderKLWan`, both layouts, bound to the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding


def build(vae: Any) -> Binding:
    """Bind the core to `vae.decode`, which returns fp32 frames.

    Raises:
        VaeInvalid: the decoder is not built as the releases this adapter knows build it, or is the light VAE,
            which upsamples the first frame in time too.
    """
    import torch

    from wanshim.core.decoding import Binding, read_graph
    from wanshim.errors import VaeInvalid

    if getattr(vae.config, "use_light_vae", False):
        raise VaeInvalid(
            "this VAE is FastVideo's light VAE", expected="the Wan 2.1 or 2.2 VAE", hint="Its decode is left as it was"
        )
    graph = read_graph(vae, output_dtype=torch.float32)
    return Binding(graph=graph, target=vae, methods={"decode": _replace})


def _replace(decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def _decode(z: torch.Tensor) -> Any:
        frames = decode(z)
        return z.new_empty(0) if frames is None else frames

    return _decode


BUILDERS = {"fastvideo.models.vaes.wanvae.AutoencoderKLWan": build}
