"""The table that ships, each row hidden in turn: of that release the other rows say what is right, or nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contract.unlisted import LEFT_OUT_WITHOUT_ITS_ROW, LEFT_TO_THE_JUDGE, REFUSED_WITHOUT_ITS_ROW
from wanshim.patching import Feature, SourceTree
from wanshim.patching.verdict import Verdict
from wanshim.select import catalog, matrix
from wanshim.select.decision import Decision, judge_code
from wanshim.select.matrix import Cell, Matrix, Row

Found = tuple[Feature, Row, Cell, Decision]


@pytest.fixture(scope="module")
def own() -> Matrix:
    return matrix.load()


@pytest.fixture(scope="module")
def found(own: Matrix) -> list[Found]:
    """Every cell, and the decision on its fingerprints by all rows but its own."""
    features = catalog.discover().features
    decided = []
    for row in own.rows:
        others = own.without(row)
        for ability, cell in row.cells.items():
            feature = features[f"{row.framework}.{ability}"]
            decided.append((feature, row, cell, by_fingerprints(feature, others, row, cell)))
    return decided


def by_fingerprints(feature: Feature, known: Matrix, row: Row, cell: Cell) -> Decision:
    """What the rows of `known` say of a cell's code. No judge: there is no source here."""
    nowhere = SourceTree(row.framework, None)
    return judge_code(replace(feature, judge=None), known, nowhere, row.version, cell.seams)


def test_release_whose_row_is_hidden_gets_no_wrong_verdict_but_a_refusal(found: list[Found]) -> None:
    """A patch comes out as `unknown`, which patches with a warning; a commit that names its code, as itself."""
    right = {Verdict.PATCH: {Verdict.UNKNOWN, Verdict.REFUSE}}
    wrong = [
        (feature.name, row.version, cell.verdict, decision)
        for feature, row, cell, decision in found
        if decision.verdict not in right.get(cell.verdict, {cell.verdict, Verdict.REFUSE})
        and not (decision.verdict is cell.verdict and decision.reason.startswith("calls itself"))
    ]
    assert not wrong


def test_refusals_of_hidden_rows_are_those_of_code_that_stands_nowhere_else(found: list[Found]) -> None:
    refused: dict[str, tuple[str, ...]] = {}
    for feature, row, cell, decision in found:
        if decision.verdict is Verdict.REFUSE and cell.verdict not in (Verdict.ABSENT, Verdict.REFUSE):
            refused[feature.name] = (*refused.get(feature.name, ()), row.version)
    listed = dict(REFUSED_WITHOUT_ITS_ROW)
    for name, versions in LEFT_TO_THE_JUDGE.items():
        listed[name] = (*listed.get(name, ()), *versions)
    assert {name: sorted(versions) for name, versions in refused.items()} == {
        name: sorted(versions) for name, versions in listed.items()
    }


def test_families_that_are_left_out_are_those_whose_code_stands_nowhere_else(found: list[Found]) -> None:
    left_out: dict[str, dict[str, tuple[str, ...]]] = {}
    for feature, row, _, decision in found:
        if decision.left_out:
            assert decision.verdict is Verdict.UNKNOWN
            left_out.setdefault(feature.name, {})[row.version] = tuple(decision.left_out)
    assert left_out == LEFT_OUT_WITHOUT_ITS_ROW


def test_code_that_is_left_to_the_judge_has_one(own: Matrix) -> None:
    features = catalog.discover().features
    assert [name for name in LEFT_TO_THE_JUDGE if features[name].judge is None] == []


def test_absent_code_whose_row_is_hidden_is_named_as_not_there(found: list[Found]) -> None:
    for feature, row, cell, decision in found:
        if cell.verdict is Verdict.ABSENT and decision.verdict is Verdict.REFUSE:
            assert " is not there" in decision.reason, (feature.name, row.version)


def test_patches_outside_the_declared_range_say_so(own: Matrix) -> None:
    features = catalog.discover().features
    outside = []
    for row in own.rows:
        for ability, cell in row.cells.items():
            feature = features[f"{row.framework}.{ability}"]
            decision = by_fingerprints(feature, own, row, cell)
            assert decision.verdict is cell.verdict
            if "outside the declared range" in decision.reason:
                outside.append((feature.name, row.version))
    patched = {
        (f"{row.framework}.{ability}", row.version)
        for row in own.rows
        for ability, cell in row.cells.items()
        if cell.verdict is Verdict.PATCH and not own.declares(row.framework, row.version)
    }
    assert set(outside) == patched
    assert ("diffsynth.vae_decode", "1.1.9") in patched
    assert ("vllm_omni.vae_decode", "0.32.0rc1") in patched
