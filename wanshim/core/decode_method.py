"""What takes the place of a framework's decode method: all ranks decode, or the framework does and the report says why.

Importing this module imports no torch: the decoders are made at the first decode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from wanshim.core.decoding import DecoderCache, DecoderGraph


class Switch(Protocol):
    """What a replacement asks of its seam: whether it is on, and where to report."""

    @property
    def notes(self) -> list[str]:
        """For the report."""
        ...

    def enter(self) -> bool:
        """Count a call; False: call the original."""
        ...


def replace_decode(
    feature: str,
    decode: Callable[..., Any],
    read: Callable[[Any], DecoderGraph] | None = None,
    applies: Callable[..., bool] = lambda *args, **kwargs: True,
) -> Callable[[Callable[..., Any], Switch], Callable[..., Any]]:
    """Makes the replacement of a VAE's decode method from the original and its `Switch`.

    Args:
        feature: the name to log under.
        decode: called as (cache, vae, *args, **kwargs), with the arguments of the method; raises DecodeFallback where
            the framework should decode.
        read: builds the graph of a VAE; None: `read_graph`, which knows the VAEs of diffusers' making.
        applies: called with the arguments of the method; False: the original decodes, and nothing is reported.
    """

    def make(original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
        @cache
        def decoders() -> DecoderCache:
            from wanshim.core.decoding import DecoderCache, read_graph

            return DecoderCache(feature, read or read_graph)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            if torch.compiler.is_compiling() or not applies(self, *args, **kwargs) or not switch.enter():
                return original(self, *args, **kwargs)
            return decoders().decode_or_fallback(
                switch.notes,
                lambda: decode(decoders(), self, *args, **kwargs),
                lambda: original(self, *args, **kwargs),
            )

        return method

    return make
