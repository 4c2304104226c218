from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.drift import toy
from tests.unit.drift.library import library, table_of
from tools.drift import table
from tools.drift.compare import Change, FeatureChange
from tools.drift.library import Library
from tools.drift.scanning import is_judged, scan
from wanshim.errors import WanshimError
from wanshim.patching.verdict import Verdict
from wanshim.select.matrix import Matrix, Row


def scan_second(tmp_path: Path, files: dict[str, str], version: str = "1.1") -> FeatureChange:
    """Release 1.0 is known; scan a second one that differs in `files`."""
    shelf = library(tmp_path)
    _, second = shelf.add_wheels([toy.wheel(tmp_path, "1.0"), toy.wheel(tmp_path, version, files)])
    (result,) = scan(second, toy.catalog(), table_of(shelf, "1.0"), shelf)
    return result


def changes(result: FeatureChange) -> dict[str, Change]:
    return {seam.target: seam.change for seam in result.seams}


def test_comments_layout_and_docstrings_leave_a_seam_unchanged(tmp_path: Path) -> None:
    text = "class Block:\n  # new\n  def forward(self, x, scale = 1): return (x*scale)\n"
    result = scan_second(tmp_path, {"models/dit.py": text})
    assert set(changes(result).values()) == {Change.UNCHANGED}
    assert result.decision.verdict is Verdict.UNKNOWN
    assert "its code is that of 1.0" in result.decision.reason


def test_changed_body_is_shown_with_its_diff_and_refused(tmp_path: Path) -> None:
    result = scan_second(tmp_path, {"loading.py": toy.LOADING.replace("open(path)", "open(path, 'rb')")})
    seam = {seam.target: seam for seam in result.seams}[toy.LOAD]
    assert seam.change is Change.CHANGED
    assert not seam.signature_changed
    assert "-    return open(path)\n+    return open(path, 'rb')\n" in seam.diff
    assert result.decision.verdict is Verdict.REFUSE


def test_changed_signature_is_said(tmp_path: Path) -> None:
    result = scan_second(tmp_path, {"loading.py": "def load(path, mode='r'):\n    return open(path)\n"})
    assert {seam.target: seam.signature_changed for seam in result.seams}[toy.LOAD]


def test_moved_definition_is_found_where_it_went(tmp_path: Path) -> None:
    result = scan_second(tmp_path, {"loading.py": "", "io/files.py": toy.LOADING})
    seam = {seam.target: seam for seam in result.seams}[toy.LOAD]
    assert (seam.change, seam.moved_to) == (Change.MOVED, "toyvideo.io.files:load")


def test_definition_that_is_nowhere_is_gone(tmp_path: Path) -> None:
    assert changes(scan_second(tmp_path, {"loading.py": ""}))[toy.LOAD] is Change.GONE


def test_scan_imports_nothing(tmp_path: Path) -> None:
    """The wheels raise on import."""
    scan_second(tmp_path, {})
    assert "toyvideo" not in sys.modules


def test_release_below_all_rows_is_held_against_the_lowest(tmp_path: Path) -> None:
    assert scan_second(tmp_path, {}, version="0.9").against == "1.0"


def test_written_row_is_unknown_until_judged(tmp_path: Path) -> None:
    changed = {"loading.py": "def load(path):\n    return path\n"}
    shelf = library(tmp_path)
    _, second = shelf.add_wheels([toy.wheel(tmp_path, "1.0"), toy.wheel(tmp_path, "1.1", changed)])
    known = table_of(shelf, "1.0")
    path = tmp_path / "m.yaml"
    path.write_text("# the head stays\n")
    table.save(table.add_rows(known, scan(second, toy.catalog(), known, shelf)), path)

    from wanshim.select.matrix import load

    written = load(path)
    assert path.read_text().startswith("# the head stays\nschema: 1\n")
    assert written.newest_seen == {"toyvideo": "1.1"}
    row = written.row("toyvideo", "1.1")
    assert row is not None
    assert row.cells["fix"].verdict is Verdict.UNKNOWN
    (again,) = scan(second, toy.catalog(), written, shelf)
    assert again.decision.verdict is Verdict.REFUSE, "a row that nobody judged must not let the patch in"
    assert not is_judged(again, written)
    assert again.against == "1.0"


def test_row_that_a_person_judged_is_not_overwritten(tmp_path: Path) -> None:
    shelf = library(tmp_path)
    (first,) = shelf.add_wheels([toy.wheel(tmp_path, "1.0")])
    known = table_of(shelf, "1.0")
    assert table.add_rows(known, scan(first, toy.catalog(), known, shelf)) == known


def test_saved_table_reads_back_equal_and_shares_lines(tmp_path: Path) -> None:
    shelf = library(tmp_path)
    shelf.add_wheels([toy.wheel(tmp_path, "1.0")])
    one = table_of(shelf, "1.0")
    row = one.rows[0]
    two = Row("toyvideo", "1.1", row.cells, ci=True, tox=True, install=('toy-video @ "x"',), environment={"torch": "2"})
    meant = Matrix((row, two), one.declared, {"toyvideo": "1.1"})
    table.save(meant, tmp_path / "m.yaml")

    from wanshim.select.matrix import load

    assert load(tmp_path / "m.yaml") == meant
    assert 'fix: {like: "1.0", tested: behaviour}' in (tmp_path / "m.yaml").read_text()


def test_wheel_of_another_distribution_is_one_clear_error(tmp_path: Path) -> None:
    path = toy.wheel(tmp_path, "1.0")
    with pytest.raises(WanshimError, match="no adapter patches a distribution 'toy-video'"):
        Library({}, tmp_path, online=False).add_wheels([path])


def test_file_that_is_no_wheel_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "broken.whl").write_text("not a zip")
    with pytest.raises(WanshimError, match="cannot be read as a wheel"):
        library(tmp_path).add_wheels([tmp_path / "broken.whl"])


def test_offline_library_downloads_nothing(tmp_path: Path) -> None:
    with pytest.raises(WanshimError, match="not among the wheels given"):
        library(tmp_path).find("toy-video==9")
