"""The kit as pytest tests: one a contract and check, all checks of a contract in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.kit.contract import Contract, Failed
from tests.kit.runner import check
from wanshim.errors import WanshimError
from wanshim.patching.verdict import Verdict
from wanshim.select import catalog, matrix
from wanshim.select.decision import installed_version


def contract_tests(*contracts: Contract) -> Callable[..., None]:
    """A parametrised test function; assign it to a name that pytest collects.

    Where the matrix says that the installed version is not patched, the one check is that nothing is.

    Raises:
        WanshimError: two contracts have the same feature and case.
    """
    import pytest

    _demand_one_case_each(contracts)
    results: dict[str, dict[str, Any]] = {}
    verdicts = _verdicts_here(*(contract.feature for contract in contracts))
    checks = {contract.id: list(contract.checks(verdicts[contract.feature])) for contract in contracts}
    cases = [
        pytest.param(contract, name, id=f"{contract.id}-{name}")
        for contract in contracts
        for name in (*checks[contract.id], *contract.left_out)
    ]

    def test_contract(contract: Contract, name: str) -> None:
        if name in contract.left_out:
            pytest.skip(contract.left_out[name])
        if contract.id not in results:
            results[contract.id] = {result.check: result for result in check(contract, checks[contract.id])}
        result = results[contract.id][name]
        assert not isinstance(result, Failed), result.found

    parametrised: Callable[..., None] = pytest.mark.parametrize(("contract", "name"), cases)(test_contract)
    return parametrised


def _demand_one_case_each(contracts: tuple[Contract, ...]) -> None:
    counts = Counter(contract.id for contract in contracts)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise WanshimError(
            f"several contracts are called {', '.join(twice)}",
            expected="one each, or the others' results would stand for it",
            hint="Give each further one a `case`",
        )


def verdict_here(feature: str) -> Verdict | None:
    """What the matrix says of a feature in the installed version; None where no row speaks of it."""
    return _verdicts_here(feature)[feature]


def _verdicts_here(*features: str) -> dict[str, Verdict | None]:
    found = catalog.discover()
    known = matrix.merge(matrix.load(), *map(matrix.load, found.matrices))
    verdicts: dict[str, Verdict | None] = dict.fromkeys(features)
    for feature in features:
        framework, ability = feature.split(".", 1)
        version = installed_version(found.frameworks[framework].distribution) if framework in found.frameworks else None
        row = known.row(framework, version or "")
        if row is not None and ability in row.cells:
            verdicts[feature] = row.cells[ability].verdict
    return verdicts
