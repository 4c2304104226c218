"""`wanshim matrix scan --folder`: source that no release has, against the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.drift import toy
from wanshim import catalog, matrix
from wanshim.cli.matrix import app
from wanshim.drift import table
from wanshim.matrix import Cell, Matrix, Row
from wanshim.patching.probe import SourceTree
from wanshim.verdict import Verdict


@pytest.fixture(autouse=True)
def _only_the_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "discover", toy.catalog)


def checkout(folder: Path, dit: str = toy.DIT) -> Path:
    """The package as a user's clone has it; importing it would fail."""
    package = folder / "toyvideo"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "models" / "__init__.py").touch()
    (package / "models" / "dit.py").write_text(dit)
    (package / "loading.py").write_text(toy.LOADING)
    return package


def known_table(folder: Path) -> Path:
    """A table that knows release 1.0, whose code is that of the toy."""
    source = SourceTree("toyvideo", checkout(folder / "release"))
    cell = Cell(Verdict.PATCH, "behaviour", "", {t: source.fingerprint(t) for t in toy.feature().targets})
    path = folder / "compat_matrix.yaml"
    table.save(Matrix((Row("toyvideo", "1.0", {"fix": cell}),), {"toyvideo": ">=1"}, {"toyvideo": "1.0"}), path)
    return path


def scan(folder: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["scan", "--folder", str(folder), "--offline", *options])


def test_folder_with_known_code_is_read_under_the_version_given_and_imported_by_nobody(tmp_path: Path) -> None:
    path = known_table(tmp_path)
    done = scan(checkout(tmp_path / "clone"), "--as", "1.0+abc", "--table", str(path), "--json")
    (change,) = json.loads(done.stdout)
    assert (change["release"], change["against"]) == ("1.0+abc", "1.0")
    assert {seam["change"] for seam in change["seams"]} == {"unchanged"}
    assert "its code is that of 1.0" in change["decision"]["reason"]
    assert "toyvideo" not in sys.modules


def test_folder_with_a_changed_body_is_refused_and_fails_the_check(tmp_path: Path) -> None:
    path = known_table(tmp_path)
    clone = checkout(tmp_path / "clone", toy.DIT.replace("x * scale", "x + scale"))
    done = scan(clone, "--as", "1.0+abc", "--table", str(path), "--json", "--check")
    (change,) = json.loads(done.stdout)
    assert {seam["target"]: seam["change"] for seam in change["seams"]}[toy.BLOCK] == "changed"
    assert change["decision"]["verdict"] == "refuse"
    assert done.exit_code == 1


def test_folder_is_written_as_an_unknown_row_of_its_version(tmp_path: Path) -> None:
    path = known_table(tmp_path)
    done = scan(checkout(tmp_path / "clone"), "--as", "1.0+abc", "--table", str(path), "--write")
    assert done.exit_code == 0, done.output
    row = matrix.load(path).row("toyvideo", "1.0+abc")
    assert row is not None
    assert row.cells["fix"].verdict is Verdict.UNKNOWN


def test_folder_that_is_no_package_of_a_framework_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "toyvideo").mkdir()
    done = scan(tmp_path / "toyvideo", "--table", str(known_table(tmp_path)))
    assert "is no package of a known framework" in str(done.exception)
