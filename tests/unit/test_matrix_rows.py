"""tests/matrix.py, which runs the rows: what it writes down of an environment, and what of a test report."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import matrix as runner
from tests.contract.about import ability_of, is_run
from wanshim.drift import table
from wanshim.matrix import Cell, Matrix, Row, load
from wanshim.verdict import Verdict


def row(framework: str, number: str) -> Row:
    cells = {"split": Cell(Verdict.PATCH, "behaviour", "", {}), "decode": Cell(Verdict.NATIVE, "probe", "", {})}
    return Row(framework, number, cells, tox=True)


def write(path: Path, *rows: Row) -> None:
    names = dict.fromkeys(row.framework for row in rows)
    table.save(Matrix(rows, dict.fromkeys(names, ">=0"), dict.fromkeys(names, "0")), path)


def test_environment_of_the_python_given_goes_into_that_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "compat_matrix.yaml"
    here, other = row("PyYAML", version("PyYAML")), row("PyYAML", "1!9")
    write(path, here, other)
    runner.record_environment(here, Path(sys.executable), path)
    first, second = load(path).rows
    assert first.environment["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert first.environment["wrapt"] == version("wrapt")
    assert not second.environment


def test_environment_with_another_version_of_the_framework_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "compat_matrix.yaml"
    write(path, row("PyYAML", "0.1"))
    with pytest.raises(SystemExit, match=r"has PyYAML .*; the row is 0\.1"):
        runner.record_environment(row("PyYAML", "0.1"), Path(sys.executable), path)
    assert not load(path).rows[0].environment


def report(*cases: str) -> ET.ElementTree:
    return ET.ElementTree(ET.fromstring(f"<testsuite>{''.join(cases)}</testsuite>"))


def test_report_gives_a_line_a_feature_with_verdict_tests_and_time() -> None:
    found = report(
        "<testcase classname='tests.contract.f.test_split' name='test_a' time='1.5'/>",
        "<testcase classname='tests.contract.f.test_split' name='test_b' time='2'><failure/></testcase>",
    )
    lines = {line.feature: line for line in runner._lines("f-1", row("f", "1"), found)}
    assert (lines["split"].verdict, lines["split"].tests, lines["split"].seconds) == (
        "patch",
        "1 failure, 1 passed",
        3.5,
    )
    assert (lines["decode"].verdict, lines["decode"].tests, lines["decode"].failed) == ("native", "none", False)


@pytest.mark.parametrize(
    "case",
    ["", "<testcase classname='tests.contract.f.test_split' name='test_a' time='0'><skipped/></testcase>"],
    ids=["none ran", "all were skipped"],
)
def test_row_that_says_behaviour_of_a_feature_without_a_passed_test_fails(case: str) -> None:
    lines = {line.feature: line for line in runner._lines("f-1", row("f", "1"), report(case))}
    assert lines["split"].failed
    assert "none passed" in lines["split"].tests


ABILITIES = ["fp8_lora", "model_split", "progress", "vae_decode"]


@pytest.mark.parametrize(
    ("module", "test", "feature"),
    [
        ("tests.contract.diffsynth.test_split_exact", "test_lora_is_exact", "model_split"),
        ("tests.contract.diffsynth.test_progress_dmd2", "test_a", "progress"),
        ("tests.contract.diffsynth.test_unlisted.TestUnlistedDiffSynth", "test_a", "all features"),
        ("tests.contract.diffsynth.test_contract_kit", "test_contract[diffsynth.fp8_lora-order_AI]", "fp8_lora"),
        ("tests.unit.test_matrix", "test_a", "all features"),
    ],
)
def test_test_is_counted_for_the_feature_of_its_contract_or_file(module: str, test: str, feature: str) -> None:
    assert runner.feature_of(module, test, ABILITIES) == feature


ABOUT_ALL = {
    "test_contract_kit",
    "test_plugins",
    "test_readme",
    "test_reach",
    "test_training_guide",
    "test_unlisted",
    "test_worker_process",
}


def test_every_contract_file_is_about_a_feature_that_exists_or_about_all() -> None:
    own = load()
    for framework in own.declared:
        known = {ability for row in own.of(framework) for ability in row.cells}
        files = [path.stem for path in (runner.ROOT / "tests/contract" / framework).glob("test_*.py")]
        about = {file: ability_of(framework, file, known) for file in files}
        assert set(about.values()) - {None} <= known
        assert {file for file, ability in about.items() if ability is None} <= ABOUT_ALL, framework


@pytest.mark.parametrize(
    ("file", "runs"),
    [
        ("test_progress_dmd2", True),
        ("test_decode_sweep", True),
        ("test_unlisted", True),
        ("test_split_exact", False),
        ("test_patchify", False),
    ],
)
def test_row_runs_the_files_of_what_it_says_behaviour_of(file: str, runs: bool) -> None:
    tested = {ability: Cell(Verdict.PATCH, "behaviour", "", {}) for ability in ("progress", "vae_decode")}
    only_read = {ability: Cell(Verdict.PATCH, "probe", "", {}) for ability in ("model_split", "patchify")}
    assert is_run("diffsynth", file, {**tested, **only_read}) is runs


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
