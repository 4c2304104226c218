"""tests/matrix.py, which runs the rows: what it writes down of an environment, and what of a test report."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import matrix as runner
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


def test_report_gives_a_line_a_feature_with_verdict_tests_and_time() -> None:
    report = ET.ElementTree(
        ET.fromstring(
            "<testsuite><testcase classname='tests.contract.f.test_split' name='test_a' time='1.5'/>"
            "<testcase classname='tests.contract.f.test_split' name='test_b' time='2'><failure/></testcase></testsuite>"
        )
    )
    lines = {line.feature: line for line in runner._lines("f-1", row("f", "1"), report)}
    assert (lines["split"].verdict, lines["split"].tests, lines["split"].seconds) == (
        "patch",
        "1 failure, 1 passed",
        3.5,
    )
    assert (lines["decode"].verdict, lines["decode"].tests) == ("native", "none")
