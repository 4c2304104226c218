"""Ties a framework's VAE to the core: how its decode call becomes a latent, and how it gets its answer back.

A builder, one per framework, looks at a VAE object and returns a `Binding`. Builders are found through the entry-point
group `wanshim.decoder_graphs`: the entry's name is the fully qualified name of the VAE's class, dots and all, its
value the builder. The core walks the classes of the object it was given, so a subclass finds its parent's builder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch

from wanshim.core.decoding.modes.tile import TileSettings
from wanshim.errors import DecodeInvalid

from .graph import DecoderGraph

GROUP = "wanshim.decoder_graphs"


class Decode(Protocol):
    """The core's decode as a binding sees it."""

    def __call__(
        self, latent: torch.Tensor, *, tiles: TileSettings | None = None, lean: bool = False
    ) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where the core's decode goes into a VAE.

    Args:
        graph: its decoder.
        target: the object whose attribute is replaced.
        attribute: the method, for instance `_decode`.
        replace: from the core's decode and the original method to the new method.
    """

    graph: DecoderGraph
    target: Any
    attribute: str
    replace: Callable[[Decode, Callable[..., Any]], Callable[..., Any]]


Builder = Callable[[Any], Binding]


def find_binding(vae: Any) -> Binding:
    """The binding of `vae`, from the builder registered for its class or the nearest parent.

    Raises:
        DecodeInvalid: no builder knows the class, or the builder found something it does not know.
    """
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    for cls in type(vae).__mro__:
        entry = known.get(f"{cls.__module__}.{cls.__qualname__}")
        if entry is not None:
            builder: Builder = entry.load()
            return builder(vae)
    raise DecodeInvalid(
        f"no decoder graph for {type(vae).__module__}.{type(vae).__qualname__}",
        expected=f"one of {', '.join(sorted(known)) or 'none installed'}",
        hint=f"Pass binding=..., or register a builder in the entry-point group {GROUP}",
    )
