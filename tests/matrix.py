"""Runs the tox rows of compat_matrix.yaml and the cross rows, one after the other, and closes with one table.

make matrix              every row, and the sweeps that are in none
make matrix ROW="A B"    those; `ROW=--list` names them all
make record ROW=A        that row, and once it has passed compat_matrix.yaml says so: the date, the commit, how many of
                         each cell's tests passed, and the exact versions that pip's metadata names in its environment

A row that cannot be built has failed, and so has one that says `behaviour` of a feature without its proof: two or more
passed tests, one at least of each name in the cell's `tests`. A row's environment is removed after it where less than
15 GB are free, with its packages in uv's cache, which share the space.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.contract.about import ability_of, is_named  # noqa: E402
from tools.drift import table as tabular  # noqa: E402
from wanshim.select.matrix import Cell, Row, load  # noqa: E402

ENOUGH_FREE = 15e9
UV = str(Path(sys.executable).with_name("uv"))  # the tools' own, beside tox
RESULTS = ROOT / ".tox" / "matrix-results"
# What a row's tests depend on beside the framework; a package that is not there is left out.
RECORDED = (
    "accelerate",
    "cache-dit",
    "diffusers",
    "distvae",
    "peft",
    "torch",
    "torchao",
    "torchaudio",
    "transformers",
    "vllm",
    "wrapt",
)
VERSIONS = """
import importlib.metadata, json, sys
found = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Line:
    """One line of the closing table."""

    row: str
    feature: str
    verdict: str
    tests: str
    seconds: float
    failed: bool
    cpu: float | None = None  # of the whole row, building included: what it takes where nobody else computes


def run(name: str, row: Row | None, record: bool = False) -> list[Line]:
    """Build and test one row; with `record`, write down that it passed, and in which environment."""
    result = RESULTS / f"{name}.xml"
    result.unlink(missing_ok=True)
    began, used = time.monotonic(), _cpu_seconds()
    newest = ["--newest"] if record else []  # else the row would record what it has recorded
    command = [sys.executable, "-m", "tox", "run", *newest, "-e", name, "--", f"--junitxml={result}"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    seconds, cpu = time.monotonic() - began, _cpu_seconds() - used
    report = ET.parse(result) if result.is_file() else None
    lines = list(_lines(name, row, report)) if report is not None else []
    failed = bool(status) or any(line.failed for line in lines)
    if record and row is not None and report is not None and not failed:
        record_run(row, report, ROOT / ".tox" / name / "bin" / "python")
    if shutil.disk_usage(ROOT).free < ENOUGH_FREE:
        remove_environment(name)
    if report is None:
        return [Line(name, "-", "-", "could not be built" + missing_python(name), seconds, True, cpu)]
    return [*lines, Line(name, "the whole row", "-", "failed" if failed else "passed", seconds, failed, cpu)]


def remove_environment(name: str) -> None:
    """With what uv's cache holds of its packages: both are links to the same files, so the one alone frees nothing."""
    packages = subprocess.run(
        [UV, "pip", "list", "--quiet", "--format=json", "--python", str(ROOT / ".tox" / name)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    shutil.rmtree(ROOT / ".tox" / name, ignore_errors=True)
    names = [package["name"] for package in json.loads(packages or "[]")]
    if names:
        subprocess.run([UV, "cache", "clean", "--quiet", *names], check=False)


def _cpu_seconds() -> float:
    """Of all processes that ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def record_run(row: Row, report: ET.ElementTree, python: Path, path: Path = ROOT / "compat_matrix.yaml") -> None:
    """Write into the row that it passed: when, at which commit, how many of each cell's tests, and what is installed
    beside `python`.

    Raises:
        SystemExit: another version of the framework is installed there, or the checkout differs from its commit.
    """
    environment, cases = environment_of(row, python), list(_cases(report))
    cells = {
        ability: replace(cell, passed=sum(_passed(cell, cases).values())) if cell.tested == "behaviour" else cell
        for ability, cell in row.cells.items()
    }
    ran = {"date": datetime.now(timezone.utc).date().isoformat(), "commit": commit_here(path)}
    matrix = load(path)
    done = replace(row, environment=environment, ran=ran, cells=cells)
    tabular.save(replace(matrix, rows=tuple(done if _same(r, row) else r for r in matrix.rows)), path)


def environment_of(row: Row, python: Path) -> dict[str, str]:
    """The exact versions beside `python` of what a row's tests depend on.

    Raises:
        SystemExit: another version of the framework is installed there.
    """
    packages = [_distribution(row), *RECORDED]
    told = subprocess.run([str(python), "-c", VERSIONS, *packages], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(told.stdout)
    version = found.get(packages[0], "none")
    if version.partition("+")[0] != row.version.partition("+")[0]:
        raise SystemExit(f"{python} has {packages[0]} {version}; the row is {row.version}")
    return {name: version for name, version in found.items() if name == "torch" or name != packages[0]}


def commit_here(records: Path) -> str:
    """The commit that is checked out; the file that rows are recorded in may differ from it.

    Raises:
        SystemExit: something else differs too, so that no commit names what ran.
    """
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{records.name}")
    if changed:
        raise SystemExit(f"not recorded, for the checkout differs from its commit:\n{changed}")
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _distribution(row: Row) -> str:
    return row.framework.replace("_", "-")


def _same(one: Row, other: Row) -> bool:
    return (one.framework, one.version) == (other.framework, other.version)


def missing_python(name: str) -> str:
    """What this machine needs for a row on another Python; nothing where that is not why it failed."""
    from toxfile import CROSS_ROWS

    wanted = CROSS_ROWS[name][1] if name in CROSS_ROWS else ""
    if not wanted or _runs(f"python{wanted}"):
        return ""
    return f": no python{wanted} that runs is on PATH; `uv python install {wanted}` or the system's packages give one"


def _runs(program: str) -> bool:
    """Being on PATH is not enough: a version manager puts a stand-in there for every version it knows of."""
    if shutil.which(program) is None:
        return False
    return subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Case:
    """One test of a report. `file` and `test` as a cell's `tests` name them, `parameters` as pytest prints them."""

    file: str
    test: str
    parameters: str
    outcome: str
    seconds: float


def _cases(report: ET.ElementTree) -> Iterator[Case]:
    for case in report.iter("testcase"):
        _, _, _, file = [*case.get("classname", "").split("."), "", "", "", ""][:4]
        test, _, parameters = case.get("name", "").partition("[")
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        yield Case(file, test, parameters, outcome, float(case.get("time", 0)))


def _lines(name: str, row: Row | None, report: ET.ElementTree) -> Iterator[Line]:
    cells = row.cells if row else {}
    counts: dict[str, Counter[str]] = {ability: Counter() for ability in cells}
    spent: Counter[str] = Counter()
    cases = list(_cases(report))
    for case in cases:
        feature = feature_of(case, row)
        counts.setdefault(feature, Counter())[case.outcome] += 1
        spent[feature] += case.seconds
    for feature, outcomes in counts.items():
        cell = cells.get(feature)
        tests = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())) or "none"
        lacks = lacking(cell, cases) if cell is not None and cell.tested == "behaviour" else ""
        tests += f"; the row says behaviour, and {lacks}" if lacks else ""
        yield Line(name, feature, cell.verdict.value if cell else "-", tests, spent[feature], bool(lacks))


def lacking(cell: Cell, cases: Iterable[Case]) -> str:
    """What a cell's proof lacks, or nothing."""
    passed = _passed(cell, list(cases))
    if not cell.tests:
        return "names no tests"
    for name in cell.tests:
        if not passed[name]:
            return f"none of {name} passed"
    return "one passed test is no proof" if sum(passed.values()) < 2 else ""


def _passed(cell: Cell, cases: Iterable[Case]) -> Counter[str]:
    """How many tests passed, by the first name in the cell that is theirs."""
    named = ((case, next((n for n in cell.tests if is_named(n, case.file, case.test)), None)) for case in cases)
    return Counter(name for case, name in named if name is not None and case.outcome == "passed")


def feature_of(case: Case, row: Row | None) -> str:
    """The ability a test is about: the one its contract names, or whose cell names it; otherwise all."""
    if row is None:
        return "all features"
    named = case.parameters.partition(f"{row.framework}.")[2].partition("-")[0]
    return (named if named in row.cells else ability_of(case.file, case.test, row.cells)) or "all features"


def _cells(line: Line) -> tuple[str, ...]:
    cpu = "" if line.cpu is None else f"{line.cpu:.0f}"
    return (line.row, line.feature, line.verdict, line.tests, f"{line.seconds:.0f}", cpu)


def main(names: list[str]) -> int:
    from toxfile import CROSS_ROWS, SWEEPS, rows  # the checkout's own list of environments; only here is tox needed

    known: dict[str, Row | None] = {row.tox_environment: row for row in rows()}
    known.update(dict.fromkeys([SWEEPS, *CROSS_ROWS]))
    if names == ["--list"]:
        print("\n".join(known))
        return 0
    record = names[:1] == ["--record"]
    names = names[1:] if record else names
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no row {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = [line for name in names or known for line in run(name, known[name], record)]
    heads = ("row", "feature", "verdict", "tests", "seconds", "CPU seconds")
    table = [heads, *map(_cells, lines)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(heads))]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    return int(any(line.failed for line in lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
