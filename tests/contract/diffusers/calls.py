"""The tiny calls that the contract kit makes, one a feature."""

from __future__ import annotations

from typing import Any


def tiny_vae() -> Any:
    import torch

    from tests.contract.diffusers.vae import make_vae

    return make_vae("2.1", torch.float32)


def decode_tiny() -> Any:
    """One latent frame (1, 4, 1, 2, 2), decoded by this process alone: the feature hands it back to the framework."""
    import torch

    from tests.contract.diffusers.vae import decode

    with torch.no_grad():
        return decode(tiny_vae(), torch.ones(1, 4, 1, 2, 2), False)


def decode_to_compile() -> tuple[Any, tuple[Any, ...]]:
    import torch

    return tiny_vae().decode, (torch.ones(1, 4, 1, 2, 2),)


def encode_tiny() -> Any:
    """One frame (1, 3, 1, 16, 16), encoded by this process alone: the feature hands it back to the framework."""
    import torch

    from tests.contract.diffusers.vae import encode

    with torch.no_grad():
        return encode(tiny_vae(), torch.ones(1, 3, 1, 16, 16), False)


def encode_to_compile() -> tuple[Any, tuple[Any, ...]]:
    import torch

    vae = tiny_vae()
    return lambda video: vae.encode(video).latent_dist.parameters, (torch.ones(1, 3, 1, 16, 16),)


def generate_tiny() -> Any:
    """Three steps without guidance, by this process alone."""
    from tests.contract.diffusers.wan_pipelines import generate, wan

    return generate(wan(), "wan", guidance_scale=1.0)
