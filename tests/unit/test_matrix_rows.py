"""tests/matrix.py, which runs the rows: what it writes down of an environment, and what of a test report."""

from __future__ import annotations

import ast
import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import matrix as runner
from tests.contract.about import is_named, is_run, proofs
from tools.drift import table
from wanshim.patching.verdict import Verdict
from wanshim.select.matrix import Cell, Matrix, Row, load


def row(framework: str, number: str) -> Row:
    cells = {
        "split": Cell(Verdict.PATCH, "behaviour", "", {}, tests=("test_split*", "test_other::test_one")),
        "decode": Cell(Verdict.NATIVE, "probe", "", {}),
    }
    return Row(framework, number, cells, tox=True)


def write(path: Path, *rows: Row) -> None:
    names = dict.fromkeys(row.framework for row in rows)
    table.save(Matrix(rows, dict.fromkeys(names, ">=0"), dict.fromkeys(names, "0")), path)


def case(file: str, test: str, outcome: str = "", seconds: float = 0) -> str:
    body = f"<{outcome}/>" if outcome else ""
    return f"<testcase classname='tests.contract.f.{file}' name='{test}' time='{seconds}'>{body}</testcase>"


def report(*cases: str) -> ET.ElementTree:
    return ET.ElementTree(ET.fromstring(f"<testsuite>{''.join(cases)}</testsuite>"))


PROOF = (case("test_split_exact", "test_a[1]"), case("test_split_exact", "test_a[2]"), case("test_other", "test_one"))


def test_run_of_a_row_is_recorded_in_that_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "compat_matrix.yaml"
    here, other = row("PyYAML", version("PyYAML")), row("PyYAML", "1!9")
    write(path, here, other)
    monkeypatch.setattr(runner, "commit_here", lambda records: "0123456789abcdef")
    unnamed = case("test_other", "test_two")
    runner.record_run(here, report(*PROOF, unnamed), Path(sys.executable), path)
    first, second = load(path).rows
    assert first.environment["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert first.environment["wrapt"] == version("wrapt")
    assert first.ran == {"date": datetime.now(timezone.utc).date().isoformat(), "commit": "0123456789abcdef"}
    assert (first.cells["split"].passed, first.cells["decode"].passed) == (3, 0)
    assert not second.environment
    assert not second.ran
    assert second.cells["split"].passed == 0


def test_run_with_another_version_of_the_framework_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "compat_matrix.yaml"
    write(path, row("PyYAML", "0.1"))
    with pytest.raises(SystemExit, match=r"has PyYAML .*; the row is 0\.1"):
        runner.record_run(row("PyYAML", "0.1"), report(*PROOF), Path(sys.executable), path)
    assert not load(path).rows[0].environment


def test_run_of_a_checkout_that_differs_from_its_commit_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the records themselves, which the row before has written."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(runner, "ROOT", tmp_path)
    code, records = tmp_path / "code.py", tmp_path / "compat_matrix.yaml"
    for file in (code, records):
        file.write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    records.write_text("2\n")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert runner.commit_here(records) == commit.stdout.strip()
    code.write_text("2\n")
    with pytest.raises(SystemExit, match=r"code\.py"):
        runner.commit_here(records)


def test_report_gives_a_line_a_feature_with_verdict_tests_and_time() -> None:
    found = report(
        *PROOF, case("test_split_exact", "test_b", "failure", 1.5), case("test_split_exact", "test_c", "", 2)
    )
    lines = {line.feature: line for line in runner._lines("f-1", row("f", "1"), found)}
    assert (lines["split"].verdict, lines["split"].tests, lines["split"].seconds) == (
        "patch",
        "1 failure, 4 passed",
        3.5,
    )
    assert (lines["decode"].verdict, lines["decode"].tests, lines["decode"].failed) == ("native", "none", False)


@pytest.mark.parametrize(
    ("cases", "lacks"),
    [
        ((), "none of test_split* passed"),
        ((case("test_split_exact", "test_a", "skipped"), PROOF[2]), "none of test_split* passed"),
        (PROOF[:2], "none of test_other::test_one passed"),
        ((*PROOF[:2], case("test_other", "test_two")), "none of test_other::test_one passed"),
    ],
    ids=["none ran", "one name's were skipped", "one name's are missing", "another test of the file passed"],
)
def test_row_that_says_behaviour_of_a_feature_without_its_proof_fails(cases: tuple[str, ...], lacks: str) -> None:
    lines = {line.feature: line for line in runner._lines("f-1", row("f", "1"), report(*cases))}
    assert lines["split"].failed
    assert lines["split"].tests.endswith(f"; the row says behaviour, and {lacks}")


@pytest.mark.parametrize(
    ("tests", "cases", "lacks"),
    [
        ((), PROOF, "names no tests"),
        (("test_other::test_one",), PROOF, "one passed test is no proof"),
        (("test_split*",), PROOF, ""),
        (("test_split*", "test_split_exact", "test_other"), PROOF, "none of test_split_exact passed"),
    ],
    ids=["no names", "one test", "two tests", "a name that another covers"],
)
def test_proof_is_two_passed_tests_and_one_of_each_name(
    tests: tuple[str, ...], cases: tuple[str, ...], lacks: str
) -> None:
    cell = Cell(Verdict.PATCH, "behaviour", "", {}, tests=tests)
    assert runner.lacking(cell, runner._cases(report(*cases))) == lacks


# feature -> tests that are counted for it, with their files
COUNTED = {
    "split": [("test_split_exact", "test_lora_is_exact[cpu]"), ("test_other", "test_one[f.split]")],
    "all features": [("test_other", "test_two"), ("test_unlisted.TestUnlistedDiffSynth", "test_a")],
    "decode": [("test_contract_kit", "test_contract[f.decode-order_AI]")],
}


@pytest.mark.parametrize(
    ("file", "test", "feature"), [(*named, feature) for feature, tests in COUNTED.items() for named in tests]
)
def test_test_is_counted_for_the_feature_of_its_contract_or_of_the_cell_that_names_it(
    file: str, test: str, feature: str
) -> None:
    (found,) = runner._cases(report(case(file, test)))
    assert runner.feature_of(found, row("f", "1")) == feature


@cache
def known_tests(framework: str) -> set[tuple[str, str]]:
    """File and name of each of its contract tests."""
    return {
        (path.stem, node.name)
        for path in (runner.ROOT / "tests/contract" / framework).glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_own_matrix_names_tests_that_exist_for_every_cell_that_says_behaviour() -> None:
    for own in load().rows:
        known = known_tests(own.framework)
        for ability, cell in own.cells.items():
            place = f"{own.framework}.{ability} at {own.version}"
            assert bool(cell.tests) is (cell.tested == "behaviour"), place
            for name in cell.tests:
                assert any(is_named(name, *test) for test in known), f"{place}: {name}"
            assert bool(cell.passed) <= bool(own.ran), place


# What a row runs whatever its cells say.
ABOUT_ALL = {
    "test_contract_kit",
    "test_plugins",
    "test_readme",
    "test_reach",
    "test_sample_waits",
    "test_training_guide",
    "test_unlisted",
    "test_without_effect",
    "test_worker_process",
}


def test_every_contract_file_is_named_by_a_cell_or_about_all_features() -> None:
    own = load()
    for framework in own.declared:
        files = {path.stem for path in (runner.ROOT / "tests/contract" / framework).glob("test_*.py")}
        assert {file for file in files if is_run(file, {}, list(own.of(framework)))} <= ABOUT_ALL, framework


@pytest.mark.parametrize(
    ("file", "runs"), [("test_progress_dmd2", True), ("test_unlisted", True), ("test_split_exact", False)]
)
def test_row_runs_the_files_that_its_own_cells_name_and_those_that_no_row_names(file: str, runs: bool) -> None:
    def cell(name: str) -> Cell:
        return Cell(Verdict.PATCH, "behaviour", "", {}, tests=(name,))

    one = Row("f", "1", {"progress": cell("test_progress*")})
    other = Row("f", "2", {"split": cell("test_split*::test_exact")})
    assert is_run(file, one.cells, [one, other]) is runs


def test_slow_tests_of_a_name_prove_a_cell_of_an_older_row_where_it_has_no_quick_one() -> None:
    slow, mixed = ("test_slow", "test_one"), ("test_mixed", "test_two")
    tests = [(slow, True), (slow, True), (mixed, True), (slow, True), (mixed, False)]

    def of(tested: str) -> list[int]:
        return proofs({"split": Cell(Verdict.PATCH, tested, "", {}, tests=("test_slow", "test_mixed*"))}, tests)

    assert of("behaviour") == [0, 1]
    assert of("probe") == []


def test_environment_is_removed_with_its_packages_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv itself is beside tox, not beside the tests: a script in its place writes down what it is told."""
    uv, told = tmp_path / "uv", tmp_path / "told"
    uv.write_text(f"""#!/bin/sh\necho "$@" >> {told}\n[ "$1" = cache ] || echo '[{{"name": "torch"}}]'\n""")
    uv.chmod(0o755)
    monkeypatch.setattr(runner, "UV", str(uv))
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    (tmp_path / ".tox/f-1/lib").mkdir(parents=True)
    runner.remove_environment("f-1")
    assert not (tmp_path / ".tox/f-1").exists()
    assert told.read_text().splitlines()[-1] == "cache clean --quiet torch"
