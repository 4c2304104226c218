"""Every feature of the catalog that changes something is under the contract kit."""

from __future__ import annotations

import importlib
from pathlib import Path

from wanshim.select import catalog

HERE = Path(__file__).parent


def test_every_feature_with_a_seam_has_a_case_of_the_contract_kit() -> None:
    """A framework's cases are data, so they are read where the framework is not installed."""
    cases = {
        contract.feature
        for path in sorted(HERE.glob("*/test_contract_kit.py"))
        for contract in importlib.import_module(f"tests.contract.{path.parent.name}.{path.stem}").CONTRACTS
    }
    changing = {name for name, feature in catalog.discover().features.items() if feature.seams}
    assert cases == changing
