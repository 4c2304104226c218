"""FastVideo's Wan decode under the contract kit."""

from __future__ import annotations

import pytest

from wanshim.testing import Contract, contract_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # thirty fresh processes; `make matrix` runs it

CONTRACTS = (
    Contract(
        feature="fastvideo.vae_decode",
        call="tests.contract.fastvideo.calls:decode_tiny",
        instance="tests.contract.fastvideo.calls:tiny_vae",
        timeout_s=800.0,
    ),
)
test_contract = contract_tests(*CONTRACTS)
