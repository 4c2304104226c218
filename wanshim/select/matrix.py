"""compat_matrix.yaml, read: which verdict a version of a framework got for a feature, and on which code."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from wanshim.errors import WanshimError
from wanshim.patching.verdict import Verdict

SCHEMA = 1
TESTED = ("behaviour", "probe", "nothing")
NAME = "compat_matrix.yaml"  # in a wheel .json


@dataclass(frozen=True)
class Cell:
    """One feature at one version: the verdict, on which code it rests, and how it was tested.

    Args:
        tests: what proves a cell `behaviour`: FILE or FILE::TEST of the framework's contract tests, * for any text.
        passed: how many of them passed when the row last ran; 0 where that was not recorded.
    """

    verdict: Verdict
    tested: str
    reason: str
    seams: Mapping[str, str | None]  # target -> fingerprint; None where that version has no such code
    tests: tuple[str, ...] = ()
    passed: int = 0

    def is_of(self, found: Mapping[str, str | None], targets: Collection[str] | None = None) -> bool:
        """Whether it speaks of the code with these fingerprints, or of that of some targets alone."""
        seams = self.seams if targets is None else {target: self.seams.get(target) for target in targets}
        return bool(self.seams) and all(found.get(target) == digest for target, digest in seams.items())


@dataclass(frozen=True)
class Row:
    """One version of a framework.

    `install` is what its tox environment installs, `environment` what that install resolved to when it was
    tested, `ran` the date and the commit of that run, `ci` whether the row belongs to the short list that .ci/run
    takes.
    """

    framework: str
    version: str
    cells: Mapping[str, Cell]
    python: str = "3.11"
    ci: bool = False
    tox: bool = False
    install: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ran: Mapping[str, str] = field(default_factory=dict)
    source: str = ""  # of code without a release: in words, where it comes from
    commit: str = ""  # and exactly: repository@commit, which `tools/matrix.py verify` checks out

    @property
    def tox_environment(self) -> str:
        return f"{self.framework}-{self.version}".replace("_", "-")


@dataclass(frozen=True)
class Matrix:
    """All rows, by framework in ascending order of version."""

    rows: tuple[Row, ...]
    declared: Mapping[str, str]
    newest_seen: Mapping[str, str]

    def of(self, framework: str) -> Iterator[Row]:
        return (row for row in self.rows if row.framework == framework)

    def spans(self, framework: str, ability: str) -> list[list[Row]]:
        """The rows with a cell for the ability, in runs of the same verdict for the same reason, ascending."""
        having = [row for row in self.of(framework) if ability in row.cells]
        return [
            list(rows)
            for _, rows in groupby(having, lambda row: (row.cells[ability].verdict, row.cells[ability].reason))
        ]

    def row(self, framework: str, version: str) -> Row | None:
        return next((row for row in self.of(framework) if row.version == version), None)

    def without(self, row: Row) -> Matrix:
        """The same, that row hidden."""
        return replace(self, rows=tuple(other for other in self.rows if other is not row))

    def declares(self, framework: str, version: str) -> bool:
        """Whether a version lies in the range that wanshim is meant for; true where the table gives no range."""
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            return SpecifierSet(self.declared.get(framework, "")).contains(version, prereleases=True)
        except InvalidSpecifier:  # "none yet"
            return True

    def known_code(self, feature: str) -> Iterator[tuple[Row, Cell]]:
        """Every row's cell of a feature that rests on code and was judged, newest first."""
        framework, ability = feature.split(".", 1)
        for row in reversed(list(self.of(framework))):
            cell = row.cells.get(ability)
            if cell is not None and cell.verdict is not Verdict.UNKNOWN and any(cell.seams.values()):
                yield row, cell


def merge(*matrices: Matrix) -> Matrix:
    """One matrix of several. A later one adds rows, and features to a row; what an earlier one said stands."""
    declared: dict[str, str] = {}
    newest: dict[str, str] = {}
    rows: dict[tuple[str, str], Row] = {}
    for one in matrices:
        declared = {**one.declared, **declared}
        newest = {**one.newest_seen, **newest}
        for row in one.rows:
            first = rows.get((row.framework, row.version), row)
            rows[row.framework, row.version] = replace(first, cells={**row.cells, **first.cells})
    return Matrix(tuple(rows.values()), declared, newest)


def path_of_own_matrix() -> Path:
    """In a wheel the matrix lies inside the package, as JSON; in a checkout beside it."""
    package = Path(__file__).parent.parent
    built, source = (package / NAME).with_suffix(".json"), package.parent / NAME
    return source if source.is_file() and not built.is_file() else built


def load(path: Path | None = None) -> Matrix:
    """Read and check a matrix.

    Raises:
        WanshimError: the file is missing, cannot be parsed, or has faults; all of them are named, each with its place.
    """
    path = path or path_of_own_matrix()
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else _parsed_yaml(text)
    except (OSError, ValueError) as error:
        raise WanshimError(
            f"{path} cannot be read: {error}",
            hint="Reinstall wanshim, or fix the file and run `wanshim matrix`",
        ) from error
    return _Reader(path).read(data)


def _parsed_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        raise ValueError(error) from error


class _Reader:
    """Reads plain data into records and collects every fault on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[str] = []

    def read(self, data: Any) -> Matrix:
        top = self.mapping(data, "")
        if top.get("schema") != SCHEMA:
            self.fault("schema", f"the number {SCHEMA}", top.get("schema"))
        rows: list[Row] = []
        declared, newest = {}, {}
        for name, framework in self.mapping(top.get("frameworks", {}), "frameworks").items():
            place = f"frameworks.{name}"
            framework = self.mapping(framework, place)
            declared[name] = self.text(framework, "declared", place)
            newest[name] = self.text(framework, "newest_seen", place)
            rows += self.rows(str(name), framework.get("rows") or [], f"{place}.rows")
        if self.faults:
            raise WanshimError(f"{self.path} has faults:\n  " + "\n  ".join(self.faults))
        return Matrix(tuple(rows), declared, newest)

    def rows(self, framework: str, data: Any, place: str) -> list[Row]:
        rows: dict[str, Row] = {}
        for i, item in enumerate(self.listing(data, place)):
            row = self.row(framework, item, f"{place}[{i}]", rows)
            if row.version and row.version in rows:
                self.fault(f"{place}[{i}].version", "each version once", row.version)
            rows[row.version] = row
        return list(rows.values())

    def row(self, framework: str, data: Any, place: str, above: Mapping[str, Row]) -> Row:
        row = self.mapping(data, place, Row, "features")
        cells = {
            str(ability): self.cell(cell, f"{place}.features.{ability}", str(ability), above)
            for ability, cell in self.mapping(row.get("features", {}), f"{place}.features").items()
        }
        environment = self.mapping(row.get("environment", {}), f"{place}.environment")
        return Row(
            framework=framework,
            version=self.text(row, "version", place),
            cells=cells,
            python=self.text(row, "python", place) if "python" in row else "3.11",
            ci=self.flag(row, "ci", place),
            tox=self.flag(row, "tox", place) or row.get("ci") is True,
            install=tuple(str(item) for item in self.listing(row.get("install") or [], f"{place}.install")),
            environment={str(k): str(v) for k, v in environment.items()},
            ran={str(k): str(v) for k, v in self.mapping(row.get("ran", {}), f"{place}.ran").items()},
            source=str(row.get("source", "")),
            commit=str(row.get("commit", "")),
        )

    def cell(self, data: Any, place: str, ability: str, above: Mapping[str, Row]) -> Cell:
        if isinstance(data, dict) and "like" in data:
            return self.cell_like(data, place, ability, above)
        cell = self.mapping(data, place, Cell)
        verdict, tested = cell.get("verdict"), cell.get("tested", "nothing")
        if verdict not in [v.value for v in Verdict]:
            self.fault(f"{place}.verdict", "one of " + ", ".join(v.value for v in Verdict), verdict)
            verdict = "unknown"
        if tested not in TESTED:
            self.fault(f"{place}.tested", "one of " + ", ".join(TESTED), tested)
        seams: dict[str, str | None] = {}
        for target, digest in self.mapping(cell.get("seams", {}), f"{place}.seams").items():
            if digest is not None and not _is_fingerprint(digest):
                self.fault(f"{place}.seams.{target}", "16 hex digits in quotes, or null", digest)
            seams[str(target)] = digest
        return Cell(Verdict(verdict), str(tested), str(cell.get("reason", "")), seams, **self.proof(cell, place))

    def proof(self, data: dict[Any, Any], place: str) -> dict[str, Any]:
        """The tests of a cell, and how many of them passed."""
        passed = data.get("passed", 0)
        if type(passed) is not int or passed < 0:
            self.fault(f"{place}.passed", "a number of tests", passed)
            passed = 0
        return {"tests": tuple(map(str, self.listing(data.get("tests", []), f"{place}.tests"))), "passed": passed}

    def cell_like(self, data: dict[Any, Any], place: str, ability: str, above: Mapping[str, Row]) -> Cell:
        """The same verdict on the same code as a row above. How it was tested is each row's own, but for the tests'
        names if it gives none."""
        for key in data.keys() - {"like", "tested", "tests", "passed"}:
            self.fault(f"{place}.{key}", "only `tested`, `tests` and `passed` beside `like`", data[key])
        row, tested = above.get(str(data["like"])), data.get("tested", "nothing")
        if tested not in TESTED:
            self.fault(f"{place}.tested", "one of " + ", ".join(TESTED), tested)
        if row is None or ability not in row.cells:
            self.fault(f"{place}.like", f"the version of a row above that has {ability}", data["like"])
            return Cell(Verdict.UNKNOWN, "nothing", "", {})
        proof = self.proof(data, place)
        if tested == "behaviour" and not proof["tests"]:
            proof["tests"] = row.cells[ability].tests
        return replace(row.cells[ability], tested=str(tested), **proof)

    def mapping(self, data: Any, place: str, record: type | None = None, *more: str) -> dict[Any, Any]:
        """`data` if it is a mapping; with a record, its keys must be that record's fields or one of `more`."""
        if not isinstance(data, dict):
            self.fault(place or "the file", "a mapping", data)
            return {}
        if record is not None:
            keys = [*(f.name for f in fields(record) if f.name not in ("framework", "cells")), *more]
            for key in data:
                if key not in keys:
                    self.fault(f"{place}.{key}", "one of the keys " + ", ".join(keys), key)
        return data

    def listing(self, data: Any, place: str) -> list[Any]:
        if isinstance(data, list):
            return data
        self.fault(place, "a list", data)
        return []

    def flag(self, data: dict[Any, Any], key: str, place: str) -> bool:
        value = data.get(key, False)
        if not isinstance(value, bool):
            self.fault(f"{place}.{key}", "true or false", value)
        return value is True

    def text(self, data: dict[Any, Any], key: str, place: str) -> str:
        value = data.get(key)
        if isinstance(value, str) and value:
            return value
        self.fault(f"{place}.{key}", "text (put versions in quotes)", value)
        return ""

    def fault(self, place: str, expected: str, found: object) -> None:
        self.faults.append(f"{place}: expected {expected}, found {found!r}")


def _is_fingerprint(value: object) -> bool:
    return isinstance(value, str) and len(value) == 16 and set(value) <= set("0123456789abcdef")
