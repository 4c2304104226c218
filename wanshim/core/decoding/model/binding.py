"""Ties a framework's VAE to the core: how its decode call becomes a latent, and how it gets its answer back.

A builder looks at a VAE object and returns a `Binding`. wanshim's own are in the adapter folders: a `vae.py` with
`BINDERS`, from the fully qualified name of the VAE's class to what builds the binding of a verb. Others register a
builder under the entry-point group `wanshim.decoder_graphs` or `wanshim.encoder_graphs`, with the name of the class as
the entry's name. The core walks the classes of the object it was given, so a subclass finds its parent's builder.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from wanshim.core.decoding.plan import TileSettings
from wanshim.errors import ModelInvalid

from .graph import Graph

ADAPTERS = "wanshim.adapters"
_GRAPHS: WeakKeyDictionary[Any, dict[str, Graph]] = WeakKeyDictionary()  # by VAE and verb


class Call(Protocol):
    """The core's decode or encode of one VAE; a tensor without elements on a rank that gets no result."""

    def __call__(
        self, given: torch.Tensor, *, tiles: TileSettings | None = None, lean: bool = False
    ) -> torch.Tensor: ...


# What a method of a VAE returns, from the core's call, the method's object and its arguments, the first of which comes
# by position. It raises VaeFallback where the framework should do it.
Compute = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The place of a VAE into which the core's decode or encode goes.

    Args:
        graph: its decoder or encoder.
        target: the object whose methods are replaced.
        methods: by name, for instance `_decode`.
        entry: the method around them that users call; None: they are it.
        around: what computes `entry`, as `methods` do theirs, if the framework's feature replaces `entry` on the class.
            Processes that share a call stand in for it too: behind it, one process has computed before they are asked.
    """

    graph: Graph
    target: Any
    methods: Mapping[str, Compute]
    entry: str | None = None
    around: Compute | None = None


Builder = Callable[[Any], Binding]


def find_binding(vae: Any, verb: str = "decode") -> Binding:
    """The binding of `vae`, from the builder registered for its class or the nearest parent.

    Args:
        verb: decode or encode.

    Raises:
        ModelInvalid: no builder knows the class, or the builder found something it does not know.
    """
    group = f"wanshim.{verb}r_graphs"
    known = _own_builders(verb) | _registered_builders(group, tuple(sys.path))
    for cls in type(vae).__mro__:
        builder = known.get(f"{cls.__module__}.{cls.__qualname__}")
        if builder is not None:
            return builder(vae)
    raise ModelInvalid(
        f"no {verb}r graph for {type(vae).__module__}.{type(vae).__qualname__}",
        expected=f"one of {', '.join(sorted(known))}",
        hint=f"Pass binding=..., or register a builder in the entry-point group {group}",
    )


@cache
def _own_builders(verb: str) -> dict[str, Builder]:
    """Those of wanshim's adapters, installed or not: a source tree has no entry points."""
    own: dict[str, Builder] = {}
    for folder in pkgutil.iter_modules(importlib.import_module(ADAPTERS).__path__, f"{ADAPTERS}."):
        name = f"{folder.name}.vae"
        if folder.ispkg and find_spec(name) is not None:
            own |= {each: partial(bind, verb) for each, bind in importlib.import_module(name).BINDERS.items()}
    return own


@cache
def _registered_builders(group: str, path: tuple[str, ...]) -> dict[str, Builder]:
    """Looked up once for a `path`: it reads the metadata of every installed distribution."""
    return {entry.name: _loading(entry) for entry in entry_points(group=group)}


def graph_of(vae: Any, verb: str, read: Callable[[Any], Graph]) -> Graph:
    """The graph that `read` builds, at the first call and where a module was replaced since."""
    known = _GRAPHS.setdefault(vae, {})
    graph = known.get(verb)
    if graph is None or graph.framework is None or graph.framework.replaced():
        graph = known[verb] = read(vae)
    return graph


def _loading(entry: EntryPoint) -> Builder:
    return lambda vae: entry.load()(vae)
