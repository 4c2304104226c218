"""Every feature of diffusers under the contract kit."""

from __future__ import annotations

import pytest

from tests.kit import Contract, contract_tests

pytestmark = [pytest.mark.slow, pytest.mark.kit, pytest.mark.timeout(1700)]  # thirty processes a feature

CONTRACTS = (
    Contract(
        feature="diffusers.fast_blocks",
        call="tests.contract.diffusers.calls:forward_in_eight_bits",
        calls={"diffusers.models.transformers.transformer_wan:WanTransformer3DModel.forward": 1},
        graph="tests.contract.diffusers.calls:forward_to_compile",
        instance="tests.contract.diffusers.calls:transformer_and_block",
        environment={"WANSHIM_COMPUTE": "int8", "WANSHIM_COMPILE": "0"},
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffusers.generate",
        call="tests.contract.diffusers.calls:generate_tiny",
        graph="tests.contract.diffusers.calls:forward_to_compile",
        instance="tests.contract.diffusers.calls:transformer_and_block",
        calls={"diffusers.pipelines.wan.pipeline_wan:WanPipeline.__call__": 1},  # what is watched counts other calls
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffusers.strict_blocks",
        call="tests.contract.diffusers.calls:forward_by_kernels",
        calls={
            "diffusers.models.transformers.transformer_wan:WanTransformerBlock.forward": 2,
            "diffusers.models.transformers.transformer_wan:WanAttnProcessor.__call__": 4,
        },
        graph="tests.contract.diffusers.calls:forward_to_compile",
        instance="tests.contract.diffusers.calls:block_and_processor",
        environment={"TRITON_INTERPRET": "1"},
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffusers.vae_decode",
        call="tests.contract.diffusers.calls:decode_tiny",
        graph="tests.contract.diffusers.calls:decode_to_compile",
        instance="tests.contract.diffusers.calls:tiny_vae",
        timeout_s=1600.0,
    ),
    Contract(
        feature="diffusers.vae_encode",
        call="tests.contract.diffusers.calls:encode_tiny",
        graph="tests.contract.diffusers.calls:encode_to_compile",
        instance="tests.contract.diffusers.calls:tiny_vae",
        timeout_s=1600.0,
    ),
)
test_contract = contract_tests(*CONTRACTS)
