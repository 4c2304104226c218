"""`tools/matrix.py missing`: the index against the table. The index is a folder of pages that the real pip reads."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.version import Version

from tests.unit.drift import toy
from tools.drift import download, table
from tools.drift.scanning import releases_without_row
from tools.matrix import app
from wanshim.patching.verdict import Verdict
from wanshim.select import catalog
from wanshim.select.matrix import Cell, Matrix, Row

CELL = Cell(Verdict.ABSENT, "probe", "not there", {toy.BLOCK: None})


def a_table(*versions: str) -> Matrix:
    rows = [Row("toyvideo", version, {"fix": CELL}) for version in versions]
    commit = Row("toyvideo", "1.0+abc", {"fix": CELL}, source="a commit")
    return Matrix((*rows, commit), {"toyvideo": "x"}, {"toyvideo": "1"})


def pip() -> list[str]:
    """The pip of this Python, or the one that came with it to fill new environments."""
    if PathFinder.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    import ensurepip

    wheels = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not wheels:
        pytest.skip("this Python has no pip, and none bundled")
    return [sys.executable, f"{wheels[-1]}/pip"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simple index: 0.9 is older than every row, 1.3 was withdrawn, 1.4 is for another Python."""
    page = tmp_path / "simple" / "toy-video"
    page.mkdir(parents=True)
    attributes = {"1.3": ' data-yanked="broken"', "1.4": ' data-requires-python="&lt;3"'}
    lines = []
    for version in ("0.9", "1.0", "1.1", "1.2", "1.3", "1.4", "1.10rc1"):
        file = f"toy_video-{version}-py3-none-any.whl"
        lines.append(f'<a href="{file}"{attributes.get(version, "")}>{file}</a>')
    (page / "index.html").write_text("<!DOCTYPE html><html><body>" + "\n".join(lines) + "</body></html>")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    monkeypatch.setattr(download, "_pip", pip)
    monkeypatch.setattr(catalog, "discover", toy.catalog)
    return tmp_path


def missing(folder: Path, matrix: Matrix, *packages: str) -> Any:
    table.save(matrix, folder / "m.yaml")
    return CliRunner().invoke(app, ["missing", "--table", str(folder / "m.yaml"), *packages])


@pytest.mark.slow
def test_releases_without_a_row_are_listed_from_the_first_row_on(index: Path) -> None:
    done = missing(index, a_table("1.0", "1.2"), "toy_video")
    assert done.output.splitlines()[0] == "toy-video: 1.1, 1.4, 1.10rc1"
    assert done.exit_code == 1


def pip_that(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """A double that prints what pip 23 does: the real one takes seconds to start, and reads the index above."""
    monkeypatch.setattr(download, "_pip", lambda: [sys.executable, "-c", f"import sys; {program}"])
    monkeypatch.setattr(catalog, "discover", toy.catalog)


def test_index_whose_releases_all_have_rows_is_said_to_be_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, r"print('toy-video (1.10rc1)\nAvailable versions: 1.10rc1, 1.2, 1.0, 0.9')")
    done = missing(tmp_path, a_table("1.0", "1.2", "1.10rc1"))
    assert (done.output, done.exit_code) == ("toy-video: every release has a row\n", 0)


def test_index_without_the_distribution_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, "sys.exit('ERROR: No matching distribution found for toy-video')")
    done = missing(tmp_path, a_table("1.0"))
    assert "the releases of toy-video cannot be listed: No matching distribution found" in str(done.exception)


def test_framework_without_rows_lacks_every_release() -> None:
    empty = Matrix((), {"toyvideo": "none yet"}, {"toyvideo": "0"})
    assert releases_without_row(empty, "toyvideo", [Version("2"), Version("1")]) == [Version("1"), Version("2")]


def test_build_of_a_release_that_has_a_row_is_not_missing() -> None:
    known = Matrix((Row("toyvideo", "1.0", {}),), {"toyvideo": ">=1"}, {"toyvideo": "1.0"})
    releases = [Version("1.0+cpu"), Version("1.1+cpu"), Version("1.0")]
    assert releases_without_row(known, "toyvideo", releases) == [Version("1.1+cpu")]


@pytest.mark.skipif(PathFinder.find_spec("setuptools") is None, reason="there is no setuptools here")
def test_setuptools_can_be_imported_after_the_search_for_pip() -> None:
    """torch imports it when it compiles; its import hook takes a process that looks for pip for pip itself."""
    program = """
from contextlib import suppress
from tools.drift import download
with suppress(Exception):  # there may be no pip
    download._pip()
import setuptools
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
