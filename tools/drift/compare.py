"""What a release did to the code a feature knows: unchanged, moved, changed, gone or new, with the diff."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from packaging.version import InvalidVersion, Version

from tools.drift.release import Release, modules_with
from wanshim.patching.feature import Feature
from wanshim.patching.probe import SourceTree, fingerprint
from wanshim.select.decision import Decision, judge_code
from wanshim.select.matrix import Cell, Matrix, Row


class Change(str, Enum):
    UNCHANGED = "unchanged"
    MOVED = "moved"  # the same name, with the same or other code, in another module
    CHANGED = "changed"
    GONE = "gone"
    NEW = "new"  # the known row has no such code
    ABSENT = "absent"  # neither has


@dataclass(frozen=True)
class SeamChange:
    """One target of a feature in a release, against the nearest known row."""

    target: str
    change: Change
    known: str | None
    found: str | None
    moved_to: str = ""
    signature_changed: bool = False
    diff: str = ""


@dataclass(frozen=True)
class FeatureChange:
    """All targets of one feature in one release, and what `doctor` would say there."""

    feature: str
    release: str
    against: str | None  # the version of the nearest known row; None where the matrix knows none
    decision: Decision
    seams: tuple[SeamChange, ...]

    @property
    def fingerprints(self) -> Mapping[str, str | None]:
        return {seam.target: seam.found for seam in self.seams}


def nearest(matrix: Matrix, feature: Feature, release: Release) -> tuple[Row, Cell] | None:
    """The judged row that rests on code and is the release's version or next below it, or else the lowest above it.
    Of a folder that nobody named: the newest whose code it has, or else the newest."""
    known = [(row, cell) for row, cell in matrix.known_code(feature.name) if not row.source]
    if not release.named:
        found = release.source.fingerprints(feature.targets)
        same = [(row, cell) for row, cell in known if cell.is_of(found)]
        return next(iter(same or known), None)
    version = release.version
    below = [pair for pair in known if _order(pair[0].version) <= _order(version)]
    if below:
        return max(below, key=lambda pair: _order(pair[0].version))
    return min(known, key=lambda pair: _order(pair[0].version), default=None)


def compare(feature: Feature, matrix: Matrix, release: Release, known: tuple[Row, Cell] | None) -> FeatureChange:
    """Hold every target of `feature` against the known row's fingerprints. Diffs come later: see `with_diffs`."""
    found = release.source.fingerprints(feature.targets)
    seams = tuple(
        _change(target, known[1].seams.get(target) if known else None, found[target], release.source)
        for target in feature.targets
    )
    decision = judge_code(feature, matrix, release.source, release.version, found)
    return FeatureChange(feature.name, release.version, known[0].version if known else None, decision, seams)


def _change(target: str, known: str | None, found: str | None, source: SourceTree) -> SeamChange:
    if found is None and known is not None:
        elsewhere = _elsewhere(target, source)
        return SeamChange(target, Change.MOVED if elsewhere else Change.GONE, known, found, elsewhere)
    if known is None:
        return SeamChange(target, Change.ABSENT if found is None else Change.NEW, known, found)
    return SeamChange(target, Change.UNCHANGED if found == known else Change.CHANGED, known, found)


def _elsewhere(target: str, source: SourceTree) -> str:
    """Another module that defines the target's name: the one with a definition of that name in full."""
    module, qualname = target.split(":")
    for candidate in modules_with(source, qualname.split(".")[0]):
        if candidate != module and source.node(f"{candidate}:{qualname}") is not None:
            return f"{candidate}:{qualname}"
    return ""


def with_diffs(result: FeatureChange, release: Release, known: Release) -> FeatureChange:
    """The same with a unified diff of the source of every seam that differs."""
    return replace(result, seams=tuple(_with_diff(seam, release, known) for seam in result.seams))


def _with_diff(seam: SeamChange, release: Release, known: Release) -> SeamChange:
    if seam.change not in (Change.CHANGED, Change.MOVED, Change.GONE):
        return seam
    place = seam.moved_to or seam.target
    before, after = source_text(known.source, seam.target), source_text(release.source, place)
    lines = difflib.unified_diff(
        before.splitlines(True),
        after.splitlines(True),
        f"{known.version} {seam.target}",
        f"{release.version} {place if after else 'gone'}",
    )
    changed = _signature(known.source.node(seam.target)) != _signature(release.source.node(place))
    return replace(seam, signature_changed=changed, diff="".join(lines))


def source_text(source: SourceTree, target: str) -> str:
    """The source lines of a target, decorators included; empty where it is not there."""
    node, file = source.node(target), source.file_of(target.split(":")[0])
    if not isinstance(node, ast.stmt) or file is None:
        return ""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    lines = file.read_text(encoding="utf-8").splitlines(True)[first - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines))


def _signature(node: ast.AST | None) -> str | None:
    return fingerprint(node.args) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def _order(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0")
