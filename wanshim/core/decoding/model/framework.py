"""The VAE that a graph was read from, as its framework has it: its modules, and its own result."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import nn

from wanshim.core.shared.fallback import Fallback, by_framework
from wanshim.core.shared.plain import has_own_forward, why_not_plain

Own = Callable[[Any, torch.Tensor], torch.Tensor]
Rebound = Callable[[nn.Module], bool]


class VaeFallback(Fallback):
    """This decode or encode stays with the framework; the text says why."""


def compute_untiled(verb: str, vae: Any, given: torch.Tensor) -> torch.Tensor:
    """The result of a VAE of diffusers' making for whole pictures; whatever happens, it holds no frames afterwards."""
    tiling, vae.use_tiling = vae.use_tiling, False
    try:
        result: torch.Tensor = vae._encode(given) if verb == "encode" else vae._decode(given, return_dict=False)[0]
        return result
    finally:
        vae.use_tiling = tiling
        vae.clear_cache()


class Framework:
    """The model from which a graph was read. It does not keep the VAE alive.

    Args:
        vae: what the framework calls a VAE.
        parts: the attributes of it, dotted, whose modules the graph computes.
        own: the framework's own result of what the graph computes, from the VAE and the graph's input, without tiles;
            None: it has none.
        rebound: whether the forward that a module has in place of its class's is a faster one of the framework's, of
            equal bits; None: there are none.
    """

    def __init__(
        self, vae: Any, parts: tuple[str, ...], own: Own | None = None, rebound: Rebound | None = None
    ) -> None:
        self._vae = ref(vae)
        self._parts = parts
        self._own = own
        self._rebound = rebound
        self._read = self._modules()
        self._forwards = {type(module): type(module).forward for module in self._read}
        packages = {cls.__module__.split(".")[0] for each in (vae, *self._roots()) for cls in type(each).__mro__}
        self._foreign = [
            cls
            for cls, forward in self._forwards.items()
            if getattr(forward, "__module__", "torch").split(".")[0] not in packages | {"torch"}
        ]

    @property
    def known(self) -> bool:
        """Has it a result of its own to compare with?"""
        return self._own is not None

    def compute(self, given: torch.Tensor) -> torch.Tensor:
        """The framework's own result of a latent [B, Z, t, h, w] or of a video [B, C, T, H, W]."""
        assert self._own is not None
        with by_framework(), torch.no_grad():
            return self._own(self._vae(), given)

    def replaced(self) -> bool:
        """Is a module another than the one that was read?"""
        now = self._modules()
        return len(now) != len(self._read) or any(a is not b for a, b in zip(now, self._read))

    def trains(self) -> bool:
        """Would the framework compute gradients of a weight?"""
        return torch.is_grad_enabled() and any(p.requires_grad for root in self._roots() for p in root.parameters())

    def why_not_plain(self) -> str | None:
        """Why the recorded graph would miss code that the framework runs: a hook, a replaced forward, a new layer."""
        if self.replaced():
            return "a layer of the VAE was replaced after it was read"
        if found := why_not_plain(self._read, self._rebound):
            return found[1] if found[0] is None else f"{self._name(found[0])} {found[1]}"
        for module in self._read:
            if type(module).forward is not self._forwards.get(type(module)):
                return f"the forward of {self._name(module)} was replaced"
            if "parametrizations" in module._modules:
                return f"{self._name(module)} is parametrized"
            if type(module) in self._foreign:
                return f"{self._name(module)} is a {type(module).__module__}.{type(module).__qualname__}"
        return None

    def is_replaced(self, module: nn.Module) -> bool:
        """Has it a forward of its own that may give other bits than its class's?"""
        return has_own_forward(module) and (self._rebound is None or not self._rebound(module))

    def _roots(self) -> list[nn.Module]:
        return list(attrgetter(*self._parts)(self._vae()))

    def _modules(self) -> list[nn.Module]:
        """All modules, in one order; `named_modules` takes several times as long, at every call."""
        found = self._roots()
        for module in found:
            found.extend(child for child in module._modules.values() if child is not None)
        return found

    def _name(self, wanted: nn.Module) -> str:
        named = ((part, root.named_modules()) for part, root in zip(self._parts, self._roots()))
        paths = (
            f"{part}.{name}".rstrip(".") for part, modules in named for name, module in modules if module is wanted
        )
        return next(paths, "a layer")
