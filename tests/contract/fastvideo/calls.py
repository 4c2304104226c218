"""The tiny calls that the contract kit makes, one a feature."""

from __future__ import annotations

from typing import Any


def tiny_vae() -> Any:
    import torch

    from tests.contract.fastvideo.vae import make_vae

    return make_vae("2.1", torch.float32)


def decode_tiny() -> Any:
    """One latent frame (1, 4, 1, 2, 2), decoded by this process alone: the feature hands it back to the framework."""
    import torch

    from tests.contract.fastvideo.vae import decode

    with torch.no_grad():
        return decode(tiny_vae(), torch.ones(1, 4, 1, 2, 2), False)


def decode_to_compile() -> tuple[Any, tuple[Any, ...]]:
    import torch

    return tiny_vae().decode, (torch.ones(1, 4, 1, 2, 2),)
