"""The contract kit: an adapter's test gives data only, and gets every check that a patch must pass.

from tests.kit import Contract, contract_tests

test_contract = contract_tests(
    Contract(feature="diffsynth.patchify", call="tests.contract.diffsynth.calls:forward")
)
"""

from tests.kit.contract import Contract, Failed, Passed
from tests.kit.pytest_tests import contract_tests
from tests.kit.runner import check

__all__ = ["Contract", "Failed", "Passed", "check", "contract_tests"]
