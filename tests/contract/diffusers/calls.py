"""The tiny calls that the contract kit makes, one a feature."""

from __future__ import annotations

from typing import Any

from tests.contract.vae_calls import VaeCalls

_CALLS = VaeCalls("tests.contract.diffusers.vae", lambda encoded: encoded.latent_dist.parameters)
tiny_vae = _CALLS.vae
decode_tiny, decode_to_compile = _CALLS.decode, _CALLS.decode_to_compile
encode_tiny, encode_to_compile = _CALLS.encode, _CALLS.encode_to_compile


def generate_tiny() -> Any:
    """Three steps without guidance, by this process alone."""
    from tests.contract.diffusers.wan_pipelines import generate, wan

    return generate(wan(), "wan", guidance_scale=1.0)
