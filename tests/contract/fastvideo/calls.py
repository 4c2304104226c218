"""The tiny calls that the contract kit makes, one a feature."""

from __future__ import annotations

from tests.contract.vae_calls import VaeCalls

_CALLS = VaeCalls("tests.contract.fastvideo.vae", lambda encoded: encoded.parameters)
tiny_vae = _CALLS.vae
decode_tiny, decode_to_compile = _CALLS.decode, _CALLS.decode_to_compile
encode_tiny, encode_to_compile = _CALLS.encode, _CALLS.encode_to_compile
