"""The kit as pytest tests: one a contract and check, all checks of a contract in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wanshim import catalog, matrix
from wanshim.decision import installed_version
from wanshim.testing.contract import Contract, Failed
from wanshim.testing.runner import check
from wanshim.verdict import Verdict


def contract_tests(*contracts: Contract) -> Callable[..., None]:
    """A parametrised test function; assign it to a name that pytest collects.

    Where the matrix says that the installed version is not patched, the one check is that nothing is.
    """
    import pytest

    results: dict[str, dict[str, Any]] = {}
    checks = {contract.feature: list(contract.checks(verdict_here(contract.feature))) for contract in contracts}
    cases = [
        pytest.param(contract, name, id=f"{contract.feature}-{name}")
        for contract in contracts
        for name in checks[contract.feature]
    ]

    def test_contract(contract: Contract, name: str) -> None:
        if contract.feature not in results:
            results[contract.feature] = {result.check: result for result in check(contract, checks[contract.feature])}
        result = results[contract.feature][name]
        assert not isinstance(result, Failed), result.found

    parametrised: Callable[..., None] = pytest.mark.parametrize(("contract", "name"), cases)(test_contract)
    return parametrised


def verdict_here(feature: str) -> Verdict | None:
    """What the matrix says of a feature in the installed version; None where no row speaks of it."""
    found = catalog.discover()
    framework, ability = feature.split(".", 1)
    if framework not in found.frameworks:
        return None
    rows = matrix.merge(matrix.load(), *map(matrix.load, found.matrices))
    row = rows.row(framework, installed_version(found.frameworks[framework]) or "")
    return row.cells[ability].verdict if row is not None and ability in row.cells else None
