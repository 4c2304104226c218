"""The kit as pytest tests: one a contract and check, all checks of a contract in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wanshim.testing.contract import Contract, Failed
from wanshim.testing.runner import check


def contract_tests(*contracts: Contract) -> Callable[..., None]:
    """A parametrised test function; assign it to a name that pytest collects."""
    import pytest

    results: dict[str, dict[str, Any]] = {}
    cases = [pytest.param(contract, name, id=f"{contract.feature}-{name}") for contract in contracts for name in contract.checks()]

    @pytest.mark.parametrize(("contract", "name"), cases)
    def test_contract(contract: Contract, name: str) -> None:
        if contract.feature not in results:
            results[contract.feature] = {result.check: result for result in check(contract)}
        result = results[contract.feature][name]
        assert not isinstance(result, Failed), result.found

    return test_contract
