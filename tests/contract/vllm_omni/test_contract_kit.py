"""Every feature of vLLM-Omni under the contract kit; a release has the one or the other."""

from __future__ import annotations

from functools import partial

import pytest

from tests.kit import Contract, contract_tests

CALLS = "tests.contract.vllm_omni.calls"
WAN = "vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_wan:DistributedAutoencoderKLWan"
# What importing vLLM-Omni costs: once for all forks of a contract, it would be twice.
THIRD_PARTY = ("torch._inductor.compile_fx", "transformers.modeling_utils")

pytestmark = [pytest.mark.slow, pytest.mark.kit, pytest.mark.timeout(1700)]  # thirty processes a feature

contract = partial(Contract, preload=THIRD_PARTY, timeout_s=1600.0)
CONTRACTS = (
    contract(feature="vllm_omni.vae_allowlist", call=f"{CALLS}:decode_video", instance=f"{CALLS}:wrapper"),
    contract(feature="vllm_omni.vae_decode", call=f"{CALLS}:decode", instance=f"{CALLS}:tiny_vae"),
    contract(
        feature="vllm_omni.vae_encode",
        call=f"{CALLS}:encode",
        calls={f"{WAN}.tiled_encode": 1, f"{WAN}._encode": 1},
        instance=f"{CALLS}:tiny_vae",
    ),
)
test_contract = contract_tests(*CONTRACTS)
