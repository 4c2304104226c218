"""Every feature of PyTorch under the contract kit."""

from __future__ import annotations

import pytest

from tests.kit import Contract, contract_tests

pytestmark = [pytest.mark.slow, pytest.mark.kit, pytest.mark.timeout(1700)]  # thirty processes a feature

CONTRACTS = (
    Contract(
        feature="torch.pg_timeout",
        call="tests.contract.torch.calls:make_two_groups",
        environment={"WANSHIM_PG_TIMEOUT_S": "1234"},
        preload=("numpy",),
        timeout_s=1600.0,
    ),
)
test_contract = contract_tests(*CONTRACTS)
