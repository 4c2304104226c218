"""What takes the place of a VAE's decode or encode: all ranks work, or the framework does and the report says why.

Importing this module imports no torch: what a VAE's calls need is made at the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from wanshim.core.decoding import Graph, VaeCache


_SHARES = "_wanshim_shares_ranks"


class Switch(Protocol):
    """What a replacement asks of its seam: whether it is on, and where to report."""

    @property
    def notes(self) -> list[str]:
        """For the report."""
        ...

    def enter(self) -> bool:
        """Count a call; False: call the original."""
        ...


def replace_method(
    feature: str,
    call: Callable[..., Any],
    read: Callable[[Any], Graph] | None = None,
    applies: Callable[..., bool] = lambda *args, **kwargs: True,
    verb: str = "decode",
) -> Callable[[Callable[..., Any], Switch], Callable[..., Any]]:
    """Makes the replacement of a VAE's method from the original and its `Switch`.

    Args:
        feature: the name to log under.
        call: called as (cache, vae, *args, **kwargs), with the arguments of the method; raises VaeFallback where
            the framework should do it.
        read: builds the graph of a VAE; None: `read_graph` or `read_encoder`, which know the VAEs of diffusers' making.
        applies: called with the arguments of the method; False: the original runs, and nothing is reported.
        verb: decode or encode.
    """

    def make(original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
        @cache
        def vaes() -> VaeCache:
            from wanshim.core.decoding import VaeCache, read_encoder, read_graph

            known: Callable[[Any], Graph] = read_encoder if verb == "encode" else read_graph
            return VaeCache(feature, read or known, verb)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            if torch.compiler.is_compiling() or not applies(self, *args, **kwargs) or not switch.enter():
                return original(self, *args, **kwargs)
            return vaes().run_or_fallback(
                switch.notes,
                lambda: call(vaes(), self, *args, **kwargs),
                lambda: original(self, *args, **kwargs),
            )

        setattr(method, _SHARES, True)
        return method

    return make


def shares_ranks(method: Any) -> bool:
    """Is `method`, of a VAE's class, one whose calls the ranks of a group share?"""
    return getattr(method, _SHARES, False) is True
