"""diffusers' `AutoencoderKLWan`, both layouts, and `AutoencoderKLQwenImage`, bound to the core."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Binding, DecoderGraph

log = logging.getLogger("wanshim")


def build(vae: Any) -> Binding:
    """Bind the core to `vae._decode`, which `decode` calls, once per sample when slicing is on.

    Raises:
        VaeInvalid: the decoder is not built as the releases this adapter knows build it, or another library decodes
            it in parallel already.
    """
    from wanshim.core.decoding import Binding

    check_free(vae, "decode")
    return Binding(graph=read(vae), target=vae, methods={"_decode": partial(_replace, vae)}, entry="decode")


def read(vae: Any) -> DecoderGraph:
    from wanshim.core.decoding import read_graph

    return read_graph(vae, own=_own)


def _own(vae: Any, z: torch.Tensor) -> Any:
    with untiled(vae):
        return vae._decode(z, return_dict=False)[0]


@contextmanager
def untiled(vae: Any) -> Iterator[None]:
    """Inside, diffusers computes whole pictures; whatever happens, it holds no frames of before."""
    tiling, vae.use_tiling = vae.use_tiling, False
    try:
        yield
    finally:
        vae.use_tiling = tiling
        vae.clear_cache()


def check_free(vae: Any, verb: str) -> None:
    """Raise VaeInvalid if somebody else uses this VAE in parallel."""
    from wanshim.errors import VaeInvalid

    holder = taken(vae, verb)
    if holder is not None:
        raise VaeInvalid(
            f"{type(vae).__qualname__}: {holder}",
            expected=f"a VAE that nobody else {verb}s in parallel",
            hint=f"Switch the other one off for the VAE to use this one; its {verb} is left as it was",
        )


def taken(vae: Any, verb: str) -> str | None:
    """Who uses this VAE in parallel, or keeps its weights elsewhere between calls; None: nobody.

    Args:
        verb: decode or encode.
    """
    if getattr(vae, "_is_parallelized", False) or getattr(vae, "_parallelism_config", None) is not None:
        return "cache-dit or diffusers' own parallelism holds it"
    for cls in type(vae).__mro__:
        if cls.__module__.startswith("diffusers."):
            break
        own = [name for name in (verb, f"_{verb}", f"tiled_{verb}") if name in cls.__dict__]
        if own:
            return f"{cls.__module__}.{cls.__qualname__} brings its own {own[0]}"
    tiles = vars(vae).get(f"tiled_{verb}")  # where xDiT puts DistVAE's; the decoder stays as it was
    if tiles is not None:
        return f"{tiles.__module__} brings its own tiled_{verb}"
    for name, module in getattr(vae, f"{verb}r").named_modules():
        package = type(module).__module__.split(".")[0]
        if package in ("distvae", "xfuser", "cache_dit"):
            return f"{package} has rebuilt {name or f'the {verb}r'}"
        if name and (hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")):
            return f"{name} is offloaded by a hook of its own"
    return None


def leave_if_taken(vae: Any, verb: str) -> None:
    """Leave a patched call to the VAE's own method where sharing it is not safe.

    Raises:
        VaeFallback: the VAE is taken, or its class is none of diffusers.
    """
    from wanshim.core.decoding import VaeFallback

    reason = taken(vae, verb)
    if reason is None and not type(vae).__module__.startswith("diffusers."):
        reason = f"{type(vae).__module__}.{type(vae).__qualname__} is not a class of diffusers"
    if reason is not None:
        raise VaeFallback(reason)


def wrap_output(sample: torch.Tensor, return_dict: bool) -> Any:
    """What `decode` returns."""
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample) if return_dict else (sample,)


def unless_taken(vae: Any, verb: str, ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, but `original` while another library has the VAE: ranks of that library wait for its own method."""
    reported: set[str] = set()

    def method(*args: Any, **kwargs: Any) -> Any:
        holder = taken(vae, verb)
        if holder is None:
            return ours(*args, **kwargs)
        if holder not in reported:
            reported.add(holder)
            log.warning("wanshim: parallelize_%s: the %s is left to diffusers: %s", verb, verb, holder)
        return original(*args, **kwargs)

    return method


def _replace(vae: Any, decode: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    from wanshim.core.decoding import TileSettings

    def _decode(z: torch.Tensor, return_dict: bool = True) -> Any:
        sample = decode(z, tiles=TileSettings.of(vae), lean=bool(vae.use_tiling))
        return wrap_output(z.new_empty(0) if sample is None else sample, return_dict)

    return unless_taken(vae, "decode", _decode, original)


_MODULES = "diffusers.models.autoencoders"
CLASSES = (
    f"{_MODULES}.autoencoder_kl_wan.AutoencoderKLWan",
    f"{_MODULES}.autoencoder_kl_qwenimage.AutoencoderKLQwenImage",
)
BUILDERS = dict.fromkeys(CLASSES, build)
