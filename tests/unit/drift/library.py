"""Wheels of the toy framework, and a table of them."""

from __future__ import annotations

from pathlib import Path

from tests.unit.drift import toy
from tools.drift.library import Library
from wanshim.patching.verdict import Verdict
from wanshim.select.matrix import Cell, Matrix, Row


def library(folder: Path) -> Library:
    return Library({"toyvideo": toy.FRAMEWORK}, folder, online=False)


def table_of(shelf: Library, version: str) -> Matrix:
    """A judged row for a release on the shelf."""
    source = shelf.releases["toyvideo", version].source
    seams = {target: source.fingerprint(target) for target in toy.feature().targets}
    cell = Cell(Verdict.PATCH, "behaviour", "", seams)
    return Matrix((Row("toyvideo", version, {"fix": cell}),), {"toyvideo": ">=1"}, {"toyvideo": version})
