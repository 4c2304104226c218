"""compat_matrix.yaml, written: canonical text from plain data, so that a row costs one line where nothing changed.

A cell that rests on the same code with the same verdict as a row above is written as `like`. The comment at
the head of the file stays; the reasons of rows belong into `reason`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from tools.drift.compare import FeatureChange
from tools.drift.release import Release
from wanshim.core.shared.files import written_whole
from wanshim.patching.verdict import Verdict
from wanshim.select.matrix import Cell, Matrix, Row, load


def add_rows(matrix: Matrix, changes: Iterable[FeatureChange], releases: Iterable[Release] = ()) -> Matrix:
    """The matrix with a cell `unknown` for everything it does not know yet; what a person judged stays. Those of
    `releases` that are folders are nobody's release: their rows say where the code comes from."""
    folders = {(one.framework, one.version): one for one in releases if one.words}
    rows = {(row.framework, row.version): row for row in matrix.rows}
    newest = dict(matrix.newest_seen)
    declared = dict(matrix.declared)
    for change in changes:
        framework, ability = change.feature.split(".", 1)
        folder = folders.get((framework, change.release))
        words, commit = (folder.words, folder.commit) if folder is not None else ("", "")
        new = Row(framework, change.release, {}, source=words, commit=commit)
        row = rows.setdefault((framework, change.release), new)
        if ability not in row.cells:
            cell = Cell(Verdict.UNKNOWN, "nothing", "scanned, to be judged", change.fingerprints)
            rows[framework, change.release] = replace(row, cells={**row.cells, ability: cell})
        newest.setdefault(framework, "0")
        if folder is None:
            newest[framework] = max(newest[framework], change.release, key=Version)
        declared.setdefault(framework, "none yet")
    return Matrix(tuple(rows.values()), declared, newest)


def save(matrix: Matrix, path: Path) -> None:
    """Write the matrix in canonical form, then read it back: what is on disk is what was meant."""
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    head = [line for line in old.splitlines() if line.startswith("#")]
    text = "\n".join([*head, *_lines(matrix)]) + "\n"
    with written_whole(path) as draft:
        draft.write_text(text, encoding="utf-8")
        load(draft)


def _lines(matrix: Matrix) -> Iterable[str]:
    yield "schema: 1"
    yield "frameworks:"
    for framework in matrix.declared:
        yield f"  {framework}:"
        yield f"    declared: {_quoted(matrix.declared[framework])}"
        yield f"    newest_seen: {_quoted(matrix.newest_seen[framework])}"
        yield "    rows:"
        above: list[Row] = []
        for row in sorted(matrix.of(framework), key=lambda row: Version(row.version)):
            yield from _row_lines(row, above)
            above.append(row)


def _row_lines(row: Row, above: list[Row]) -> Iterable[str]:
    yield f"      - version: {_quoted(row.version)}"
    written = {
        "source": row.source and _quoted(row.source),
        "commit": row.commit and _quoted(row.commit),
        "python": _quoted(row.python) if row.python != Row.python else "",
        "ci" if row.ci else "tox": "true" if row.ci or row.tox else "",
        "install": row.install and _listed(row.install),
        "environment": row.environment and _flow(row.environment),
        "ran": row.ran and _flow(row.ran),
    }
    yield from (f"        {key}: {value}" for key, value in written.items() if value)
    yield "        features:"
    for ability in sorted(row.cells):
        yield from _cell_lines(ability, row.cells[ability], above)


def _cell_lines(ability: str, cell: Cell, above: list[Row]) -> Iterable[str]:
    for row in above:
        if ability in row.cells and _same_code(row.cells[ability], cell):
            inherits = cell.tests == row.cells[ability].tests
            tests = f", tests: {_listed(cell.tests)}" if cell.tests and not inherits else ""
            passed = f", passed: {cell.passed}" if cell.passed else ""
            yield f"          {ability}: {{like: {_quoted(row.version)}, tested: {cell.tested}{tests}{passed}}}"
            return
    yield f"          {ability}:"
    yield f"            verdict: {cell.verdict.value}"
    yield f"            tested: {cell.tested}"
    if cell.tests:
        yield f"            tests: {_listed(cell.tests)}"
    if cell.passed:
        yield f"            passed: {cell.passed}"
    if cell.reason:
        yield f"            reason: {_quoted(cell.reason)}"
    if cell.seams:
        yield "            seams:"
        for target, digest in cell.seams.items():
            yield f"              {target}: {'null' if digest is None else _quoted(digest)}"


def _same_code(one: Cell, other: Cell) -> bool:
    """Whether they agree but for how they were tested."""
    return replace(one, tested=other.tested, tests=other.tests, passed=other.passed) == other


def _listed(texts: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _flow(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {_quoted(value)}" for key, value in sorted(values.items())) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
