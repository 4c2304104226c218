"""Every feature of vLLM-Omni under the contract kit; a release has the one or the other."""

from __future__ import annotations

import pytest

from wanshim.testing import Contract, contract_tests

CALLS = "tests.contract.vllm_omni.calls"
# What importing vLLM-Omni costs: once for all forks of a contract, it would be twice.
THIRD_PARTY = ("torch._inductor.compile_fx", "transformers.modeling_utils")

pytestmark = [pytest.mark.slow, pytest.mark.kit, pytest.mark.timeout(1700)]  # thirty processes a feature

CONTRACTS = (
    Contract(
        feature="vllm_omni.vae_allowlist",
        call=f"{CALLS}:decode_video",
        preload=THIRD_PARTY,
        instance=f"{CALLS}:wrapper",
        timeout_s=1600.0,
    ),
    Contract(
        feature="vllm_omni.vae_decode",
        call=f"{CALLS}:decode_tiles",
        preload=THIRD_PARTY,
        instance=f"{CALLS}:tiny_vae",
        timeout_s=1600.0,
    ),
    Contract(
        feature="vllm_omni.vae_encode",
        call=f"{CALLS}:encode_tiles",
        preload=THIRD_PARTY,
        instance=f"{CALLS}:tiny_vae",
        timeout_s=1600.0,
    ),
)
test_contract = contract_tests(*CONTRACTS)
