"""The contract kit: an adapter's test gives data only, and gets every check that a patch must pass.

    from wanshim.testing import Contract, contract_tests

    test_contract = contract_tests(
        Contract(feature="diffsynth.patchify", call="tests.contract.diffsynth.calls:forward")
    )
"""

from wanshim.testing.contract import Contract, Failed, Passed
from wanshim.testing.pytest_tests import contract_tests
from wanshim.testing.runner import check

__all__ = ["Contract", "Failed", "Passed", "check", "contract_tests"]
