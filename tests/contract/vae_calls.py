"""The tiny calls of the contract kit on a framework's VAE; every framework's `calls` names its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class VaeCalls:
    """Each decodes or encodes by this process alone: the feature hands it back to the framework.

    Args:
        module: with `make_vae`, `decode` and `encode` of the framework.
        parameters: the tensor of what the VAE's own `encode` returns.
    """

    def __init__(self, module: str, parameters: Callable[[Any], Any]) -> None:
        self._module, self._parameters = module, parameters

    def vae(self) -> Any:
        import torch

        return importlib.import_module(self._module).make_vae("2.1", torch.float32)

    def decode(self) -> Any:
        """One latent frame (1, 4, 1, 2, 2)."""
        import torch

        with torch.no_grad():
            return importlib.import_module(self._module).decode(self.vae(), torch.ones(1, 4, 1, 2, 2), False)

    def decode_to_compile(self) -> tuple[Any, tuple[Any, ...]]:
        import torch

        return self.vae().decode, (torch.ones(1, 4, 1, 2, 2),)

    def encode(self) -> Any:
        """One frame (1, 3, 1, 16, 16)."""
        import torch

        with torch.no_grad():
            return importlib.import_module(self._module).encode(self.vae(), torch.ones(1, 3, 1, 16, 16), False)

    def encode_to_compile(self) -> tuple[Any, tuple[Any, ...]]:
        import torch

        vae = self.vae()
        return lambda video: self._parameters(vae.encode(video)), (torch.ones(1, 3, 1, 16, 16),)
