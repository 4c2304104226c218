"""Every feature of DiffSynth under the contract kit."""

from __future__ import annotations

from wanshim.testing import Contract, contract_tests

CALLS = "tests.contract.diffsynth.calls"

test_contract = contract_tests(
    Contract(
        feature="diffsynth.patchify",
        call=f"{CALLS}:direct_forward",
        graph=f"{CALLS}:direct_forward_to_compile",
        instance=f"{CALLS}:tiny_model",
    ),
)
