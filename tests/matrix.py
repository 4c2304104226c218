"""Runs the rows of compat_matrix.yaml and the cross rows, one after the other, and closes with one table.

python tests/matrix.py               every row
python tests/matrix.py ROW [ROW...]  those; `--list` names them all

A row that cannot be built has failed. A row's environment is removed after it where less than 15 GB are free.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from toxfile import CROSS_ROWS, rows  # noqa: E402 - the checkout's own list of environments
from wanshim.matrix import Row  # noqa: E402

ENOUGH_FREE = 15e9
RESULTS = ROOT / ".tox" / "matrix-results"


@dataclass(frozen=True)
class Line:
    """One line of the closing table."""

    row: str
    feature: str
    verdict: str
    tests: str
    seconds: float
    failed: bool


def run(name: str, row: Row | None) -> list[Line]:
    """Build and test one row."""
    result = RESULTS / f"{name}.xml"
    result.unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "tox", "run", "-e", name, "--", f"--junitxml={result}"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    seconds = time.monotonic() - began
    if shutil.disk_usage(ROOT).free < ENOUGH_FREE:
        shutil.rmtree(ROOT / ".tox" / name, ignore_errors=True)
    if not result.is_file():
        return [Line(name, "-", "-", "could not be built" + missing_python(name), seconds, True)]
    return list(_lines(name, row, ET.parse(result), seconds, bool(status)))


def missing_python(name: str) -> str:
    """What this machine needs for a row on another Python; nothing where that is not why it failed."""
    wanted = CROSS_ROWS[name][1] if name in CROSS_ROWS else ""
    if not wanted or _runs(f"python{wanted}"):
        return ""
    return f": no python{wanted} that runs is on PATH; `uv python install {wanted}` or the system's packages give one"


def _runs(program: str) -> bool:
    """Being on PATH is not enough: a version manager puts a stand-in there for every version it knows of."""
    if shutil.which(program) is None:
        return False
    return subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0


def _lines(name: str, row: Row | None, report: ET.ElementTree, seconds: float, failed: bool) -> Iterator[Line]:
    counts: dict[str, Counter[str]] = {}
    spent: Counter[str] = Counter()
    for case in report.iter("testcase"):
        feature = feature_of(f"{case.get('classname')}.{case.get('name')}", list(row.cells) if row else [])
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        counts.setdefault(feature, Counter())[outcome] += 1
        spent[feature] += float(case.get("time", 0))
    untested = [ability for ability in (row.cells if row else {}) if ability not in counts]
    for feature in [*counts, *untested]:
        verdict = row.cells[feature].verdict.value if row and feature in row.cells else "-"
        tests = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.get(feature, {}).items()))
        yield Line(name, feature, verdict, tests or "none", spent[feature], False)
    yield Line(name, "the whole row", "-", "failed" if failed else "passed", seconds, failed)


def feature_of(test: str, abilities: list[str]) -> str:
    """The ability a test is about: the one its file, name or contract names, in full or by its last word."""
    whole = [ability for ability in abilities if ability in test]
    by_word = [ability for ability in abilities if ability.rsplit("_", 1)[-1] in test]
    return (whole or by_word or ["all features"])[0]


def main(names: list[str]) -> int:
    known: dict[str, Row | None] = {row.tox_environment: row for row in rows()}
    known.update(dict.fromkeys(CROSS_ROWS))
    if names == ["--list"]:
        print("\n".join(known))
        return 0
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no row {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = [line for name in names or known for line in run(name, known[name])]
    heads = ("row", "feature", "verdict", "tests", "seconds")
    table = [heads, *((one.row, one.feature, one.verdict, one.tests, f"{one.seconds:.0f}") for one in lines)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(heads))]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    return int(any(line.failed for line in lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
