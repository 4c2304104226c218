from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.drift import toy
from tests.unit.drift.library import library, table_of
from tools.drift.library import Library
from tools.drift.verification import Difference, Unread, verify
from wanshim.patching import Finding
from wanshim.patching.verdict import Verdict
from wanshim.select.matrix import Matrix, Row


def differences(matrix: Matrix, shelf: Library) -> list[Difference]:
    found = verify(matrix, shelf.of_row, matrix.rows, toy.catalog().features.values())
    return [one for one in found if isinstance(one, Difference)]


def with_seams(matrix: Matrix, **changed: str | None) -> Matrix:
    (row,) = matrix.rows
    cell = row.cells["fix"]
    seams = {**cell.seams, toy.LOAD: changed["load"]}
    return replace(matrix, rows=(replace(row, cells={"fix": replace(cell, seams=seams)}),))


def test_table_that_is_true_has_no_differences(tmp_path: Path) -> None:
    shelf = library(tmp_path)
    shelf.add_wheels([toy.wheel(tmp_path, "1.0")])
    assert differences(table_of(shelf, "1.0"), shelf) == []


@pytest.mark.parametrize("lie", ["0123456789abcdef", None])
def test_fingerprint_that_the_release_does_not_have_is_a_difference(tmp_path: Path, lie: str | None) -> None:
    shelf = library(tmp_path)
    shelf.add_wheels([toy.wheel(tmp_path, "1.0")])
    (found,) = differences(with_seams(table_of(shelf, "1.0"), load=lie), shelf)
    assert f": {toy.LOAD}: the table says {lie}, the release " in str(found)


@pytest.mark.parametrize(
    ("verdict", "judged", "wrong"),
    [
        (Verdict.PATCH, None, []),
        (Verdict.PATCH, Verdict.PATCH, []),
        (Verdict.NATIVE, Verdict.NATIVE, []),
        (Verdict.UNKNOWN, Verdict.NATIVE, []),
        (Verdict.PATCH, Verdict.NATIVE, ["toyvideo.fix is patch, and without this row native: so it says"]),
        (Verdict.NATIVE, Verdict.PATCH, ["toyvideo.fix is native, and without this row unknown: so it says"]),
    ],
)
def test_judge_that_contradicts_the_row_of_the_code_it_judges_is_a_difference(
    tmp_path: Path, verdict: Verdict, judged: Verdict | None, wrong: list[str]
) -> None:
    shelf = library(tmp_path)
    shelf.add_wheels([toy.wheel(tmp_path, "1.0")])
    known = table_of(shelf, "1.0")
    (row,) = known.rows
    row = replace(row, cells={"fix": replace(row.cells["fix"], verdict=verdict)})
    finding = Finding(judged, "so it says") if judged is not None else None
    feature = replace(toy.feature(), judge=lambda source: finding)
    found = verify(replace(known, rows=(row,)), shelf.of_row, [row], [feature])
    assert [one.problem for one in found if isinstance(one, Difference)] == wrong


def test_release_that_cannot_be_fetched_is_unread_and_no_difference(tmp_path: Path) -> None:
    shelf = library(tmp_path)
    shelf.add_wheels([toy.wheel(tmp_path, "1.0")])
    known = table_of(shelf, "1.0")
    (found,) = verify(known, library(tmp_path).of_row, known.rows, toy.catalog().features.values())
    assert isinstance(found, Unread)
    assert "toyvideo 1.0: toy-video==1.0 is not among the wheels given" in str(found)


def test_row_that_names_no_commit_for_its_source_is_a_difference(tmp_path: Path) -> None:
    shelf = library(tmp_path)
    shelf.add_wheels([toy.wheel(tmp_path, "1.0")])
    known = table_of(shelf, "1.0")
    (found,) = differences(replace(known, rows=(replace(known.rows[0], version="2", source="main"),)), shelf)
    assert "the row names no commit" in str(found)


def test_row_without_release_is_verified_at_its_commit(tmp_path: Path) -> None:
    repository = tmp_path / "upstream"
    (repository / "toyvideo" / "models").mkdir(parents=True)
    (repository / "toyvideo" / "__init__.py").touch()
    (repository / "toyvideo" / "models" / "dit.py").write_text(toy.DIT)
    (repository / "toyvideo" / "loading.py").write_text(toy.LOADING)
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    shelf = library(tmp_path)
    shelf.add_wheels([toy.wheel(tmp_path, "1.0")])
    cells = table_of(shelf, "1.0").rows[0].cells
    row = Row("toyvideo", "1.0+abc", cells, source="since abc", commit=f"{repository}@{head}")
    online = Library({"toyvideo": toy.FRAMEWORK}, tmp_path / "new", online=True)
    matrix = Matrix((row,), {"toyvideo": ">=1"}, {"toyvideo": "1.0"})
    assert differences(matrix, online) == []
    (repository / "toyvideo" / "loading.py").write_text("def load(): pass\n")
    for command in (["add", "."], ["commit", "-qm", "two"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    moved = replace(matrix, rows=(replace(row, commit=f"{repository}@{head}"),))
    again = Library({"toyvideo": toy.FRAMEWORK}, tmp_path / "again", online=True)
    assert [found.problem.partition(": ")[0] for found in differences(moved, again)] == [toy.LOAD]
