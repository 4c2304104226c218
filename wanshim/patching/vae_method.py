"""The replacement of a VAE's decode or encode: all ranks share it, or the framework does it and the report says why.

Importing this module imports no torch: what the calls of a VAE need is made at the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from wanshim.patching import SeamState

if TYPE_CHECKING:
    import torch

    from wanshim.core.decoding import Graph, TileSettings, VaeCache, VaeOptions
    from wanshim.settings import Settings

_SHARES = "_wanshim_shares_ranks"


class SharedCall(Protocol):
    """`VaeCache.run` with the options that the user has set."""

    def __call__(
        self,
        vae: Any,
        given: torch.Tensor,
        *,
        group: Any = None,
        tiles: TileSettings | None = None,
        lean: bool = False,
        **changed: Any,
    ) -> torch.Tensor: ...


def replace_method(
    call: Callable[..., Any],
    read: Callable[[Any], Graph] | None = None,
    applies: Callable[..., bool] = lambda *args, **kwargs: True,
    verb: str = "decode",
) -> Callable[[Callable[..., Any], SeamState], Callable[..., Any]]:
    """Makes the replacement of a VAE's method from the original and its seam.

    Args:
        call: called with a `SharedCall` and the arguments of the method; raises VaeFallback if the framework should do
            it.
        read: builds the graph of a VAE; None: `read_graph` or `read_encoder`, for a VAE built as in diffusers.
        applies: called with the arguments of the method; False: the original runs, and nothing is reported.
        verb: decode or encode.
    """

    def make(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
        @cache
        def vaes() -> VaeCache:
            from wanshim.core.decoding import VaeCache, read_encoder, read_graph

            known: Callable[[Any], Graph] = read_encoder if verb == "encode" else read_graph
            return VaeCache(read or known, verb)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            from wanshim.core.decoding import VaeFallback, framework_computes

            if torch.compiler.is_compiling() or framework_computes() or not applies(self, *args, **kwargs):
                return original(self, *args, **kwargs)
            if not seam.enter():
                return original(self, *args, **kwargs)
            try:
                result = call(partial(vaes().run, options=_options(verb, seam.settings)), self, *args, **kwargs)
            except VaeFallback as error:
                seam.fall_back(str(error))
                return original(self, *args, **kwargs)
            if (plan := str(vaes().plan)) not in seam.notes:
                seam.notes.append(plan)
            return result

        setattr(method, _SHARES, True)
        return method

    return make


def _options(verb: str, read: Settings) -> VaeOptions:
    from wanshim.core.decoding import VaeFallback, VaeOptions

    mode = read.vae_encode if verb == "encode" else read.vae_mode
    if mode == "off":
        raise VaeFallback(f"the {verb} mode is off")
    options = VaeOptions(mode=mode or "auto", strict=not read.vae_fast, engines=read.vae_engines)
    return options if read.vae_timeout_s is None else replace(options, deadline=read.vae_timeout_s)


def shares_ranks(method: Any) -> bool:
    """Whether the ranks of a group share the calls of this method of a VAE's class."""
    return getattr(method, _SHARES, False) is True
