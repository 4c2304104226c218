"""`tools/matrix.py scan --folder`: source that no release has, against the table."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.unit.drift import toy
from tools.drift import table
from tools.drift.checkout import check_out, commit_of
from tools.drift.library import Library
from tools.drift.verification import verify
from tools.matrix import app
from wanshim.patching.probe import SourceTree
from wanshim.patching.verdict import Verdict
from wanshim.select import catalog, matrix
from wanshim.select.matrix import Cell, Matrix, Row


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
    found = matrix.load(path)
    row = found.row("toyvideo", "1.0+abc")
    assert row is not None
    assert row.cells["fix"].verdict is Verdict.UNKNOWN
    assert (row.source, row.commit) == ("a folder of source that was called 1.0+abc", "")
    assert found.newest_seen == {"toyvideo": "1.0"}, "the index has no release of that name"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone, with `origin` set, of a repository that has the toy with another body."""
    checkout(tmp_path / "upstream", toy.DIT.replace("x * scale", "x + scale"))
    git(tmp_path / "upstream", "init", "-q")
    git(tmp_path / "upstream", "add", ".")
    git(tmp_path / "upstream", "commit", "-qm", "one")
    git(tmp_path, "clone", "-q", str(tmp_path / "upstream"), str(tmp_path / "clone"))
    return tmp_path / "clone" / "toyvideo"


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_folder_of_a_clone_is_written_with_its_commit_and_verified_there(tmp_path: Path, clone: Path) -> None:
    path = known_table(tmp_path)
    assert scan(clone, "--as", "1.0+abc", "--table", str(path), "--write").exit_code == 0
    found = matrix.load(path)
    row = found.row("toyvideo", "1.0+abc")
    assert row is not None
    assert row.commit == f"{tmp_path / 'upstream'}@{git(clone, 'rev-parse', 'HEAD')}"
    assert row.source == row.commit
    shelf = Library({"toyvideo": toy.FRAMEWORK}, tmp_path / "downloads", online=True)
    assert list(verify(found, shelf.of_row, [row], toy.catalog().features.values())) == [row]


def test_clone_with_a_change_of_its_own_names_no_commit(tmp_path: Path, clone: Path) -> None:
    (clone / "loading.py").write_text("def load(path):\n    return path\n")
    assert commit_of(clone) == ""


@pytest.mark.parametrize("place", ["toyvideo", "src/toyvideo", "examples/toyvideo"])
def test_commit_is_named_where_it_can_be_checked_out_again(tmp_path: Path, clone: Path, place: str) -> None:
    if place != "toyvideo":
        (clone.parent / place).parent.mkdir()
        git(clone.parent, "mv", "toyvideo", place)
        git(clone.parent, "commit", "-qm", "moved")
    found = commit_of(clone.parent / place)
    assert bool(found) is (place != "examples/toyvideo")
    if found:
        git(clone.parent, "push", "-q", "origin", "HEAD:refs/heads/moved")
        assert (check_out(found, "toyvideo", tmp_path / "again") / "loading.py").read_text() == toy.LOADING


def test_address_of_a_clone_loses_its_users_token(clone: Path) -> None:
    git(clone, "remote", "set-url", "origin", "https://me:secret@example.org/toyvideo")
    assert commit_of(clone) == f"https://example.org/toyvideo@{git(clone, 'rev-parse', 'HEAD')}"


def test_folder_without_a_version_cannot_be_written(tmp_path: Path) -> None:
    path = known_table(tmp_path)
    before = path.read_text()
    done = scan(checkout(tmp_path / "clone"), "--table", str(path), "--write")
    assert "Give its row one with --as" in str(done.exception)
    assert path.read_text() == before


@pytest.mark.parametrize(("dit", "against"), [(toy.DIT, "1.0"), (toy.DIT.replace("*", "-"), "1.2")])
def test_folder_without_a_version_is_held_against_the_row_with_its_code_or_the_newest(
    tmp_path: Path, dit: str, against: str
) -> None:
    path = known_table(tmp_path)
    known = matrix.load(path)
    (row,) = known.rows
    other = replace(row.cells["fix"], seams=dict.fromkeys(row.cells["fix"].seams, "0" * 16))
    rows = [Row("toyvideo", version, {"fix": other}) for version in ("0.9", "1.2")]
    table.save(replace(known, rows=(*rows, row)), path)
    done = scan(checkout(tmp_path / "clone", dit), "--table", str(path), "--json")
    (change,) = json.loads(done.stdout)
    assert change["against"] == against


def test_folder_that_is_no_package_of_a_framework_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "toyvideo").mkdir()
    done = scan(tmp_path / "toyvideo", "--table", str(known_table(tmp_path)))
    assert "is no package of a known framework" in str(done.exception)
