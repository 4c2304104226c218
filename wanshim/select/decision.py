"""Decide for one feature what to do with the framework that is installed. Reads files, imports nothing.

Two gates, both mandatory: the row of the installed version says which code to expect, and the code found
must be that code. A version number alone decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from wanshim.patching.feature import Feature, Framework
from wanshim.patching.probe import Folder, SourceTree
from wanshim.patching.verdict import Verdict
from wanshim.select.matrix import Cell, Matrix, Row
from wanshim.settings import Settings


@dataclass(frozen=True)
class Decision:
    """A decision on a feature, with the reason."""

    verdict: Verdict
    reason: str
    next_step: str = ""
    version: str | None = None
    fingerprints: Mapping[str, str | None] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)  # families of models whose code is not known, why each is
    known: bool = True  # False: neither a row nor the feature's judge knows the code
    ran: bool = True  # False: a row says so of a version outside the declared range, from reading its code alone
    root: Folder | None = field(default=None, compare=False)  # the package that was read; of another it says nothing

    @property
    def untested(self) -> bool:
        """Whether to warn when it is patched: its version has no row, or one that nothing ran for."""
        return self.verdict is Verdict.UNKNOWN or (self.verdict is Verdict.PATCH and not self.ran)

    @property
    def applies(self) -> bool:
        return self.verdict in (Verdict.PATCH, Verdict.UNKNOWN)


def installed_version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def decide(
    feature: Feature,
    framework: Framework,
    matrix: Matrix,
    settings: Settings,
    sources: dict[str, SourceTree] | None = None,
) -> Decision:
    """The verdict for `feature` on the installed `framework`.

    Args:
        sources: what was read for other features, by framework; it is added to.
    """
    sources = {} if sources is None else sources
    if framework.name not in sources:
        sources[framework.name] = SourceTree.of_installed(framework.name)
    source = sources[framework.name]
    version = installed_version(framework.distribution)
    if source.root is None:
        return Decision(Verdict.ABSENT, f"no package {framework.name} is installed here", version=version)
    found = source.fingerprints(feature.targets)
    decision = judge_code(feature, matrix, source, version, found)
    blocked = feature.blocked(settings) if decision.applies and feature.blocked is not None else None
    if blocked is not None:
        decision = Decision(Verdict.REFUSE, blocked, version=version, fingerprints=found)
    return replace(decision, root=source.root)


def judge_code(
    feature: Feature, matrix: Matrix, source: SourceTree, version: str | None, found: Mapping[str, str | None]
) -> Decision:
    """The verdict on code whose fingerprints are `found`, wherever it lies."""
    row = matrix.row(feature.framework, version) if version else None
    cell = row.cells.get(feature.ability) if row is not None else None
    if cell is not None and cell.verdict is Verdict.UNKNOWN:
        cell = None  # written down by `tools/matrix.py scan`, not judged by anyone yet
    if row is not None and cell is not None and cell.is_of(found):
        return _as_listed(row, cell, matrix, found)
    # A row that says "absent" speaks of code that is not there; whatever is there instead is judged afresh.
    unlisted = cell is None or cell.verdict is Verdict.ABSENT
    why = _unlisted(feature, row, version)
    # A commit between two releases carries the version string of the earlier one, and may have the code of the later.
    # Releases first: code without a release speaks for no third one.
    for known, known_cell in sorted(matrix.known_code(feature.name), key=lambda pair: bool(pair[0].source)):
        if known_cell.is_of(found):
            return _like_known(known, known_cell, why, version, found)
    listed = (row, cell) if row is not None and cell is not None and not unlisted else None
    partly = _without_families(feature, listed, matrix, why, version, found)
    if partly is not None:
        return partly
    finding = feature.judge(source) if feature.judge is not None else None
    if finding is not None and (unlisted or finding.verdict in (Verdict.NATIVE, Verdict.ABSENT)):
        verdict = Verdict.UNKNOWN if finding.verdict is Verdict.PATCH else finding.verdict
        return Decision(verdict, finding.reason, "", version, found)
    return _mismatch(feature, cell, why, version, found, _never_there(feature, matrix), source)


def _without_families(
    feature: Feature, listed: tuple[Row, Cell] | None, matrix: Matrix, why: str, version: str | None,
    found: Mapping[str, str | None],
) -> Decision | None:  # fmt: skip
    """The decision if the code that is there for all families of models is known, and that of at least one family. Each
    family's code may be that of another row.

    Args:
        listed: the version's own row, which alone says what its code is if it fits; None: it has none.
    """
    families = {name: [target for target in found if feature.family_of(target) == name] for name in feature.families}
    common = [target for target in found if feature.family_of(target) is None]
    rows = sorted(matrix.known_code(feature.name), key=lambda pair: bool(pair[0].source))
    fitting = [(row, cell) for row, cell in rows if cell.verdict is Verdict.PATCH and cell.is_of(found, common)]
    listed = listed if listed in fitting else None
    fitting = fitting if listed is None else [listed]
    if not fitting:
        return None
    left_out = {
        name: _why_unknown(targets, found, listed)
        for name, targets in families.items()
        if not any(cell.is_of(found, targets) for _, cell in fitting)
    }
    others = [target for name, targets in families.items() if name not in left_out for target in targets]
    if not any(found[target] for target in others):
        return None
    row, cell = max(fitting, key=lambda pair: sum(pair[1].is_of(found, targets) for targets in families.values()))
    whole = _like_known(row, cell, why, version, found) if listed is None else _as_listed(row, cell, matrix, found)
    reasons = (whole.reason, *(f"{name} is left out: {reason}" for name, reason in left_out.items()))
    return replace(whole, reason="; ".join(reasons), left_out=left_out)


def _why_unknown(targets: Sequence[str], found: Mapping[str, str | None], listed: tuple[Row, Cell] | None) -> str:
    """Why the code of a family, which is at these targets, is not known."""
    if listed is not None:
        return _difference(targets, found, listed[1], listed[0].version)
    gone = not any(found[target] for target in targets)
    return f"{targets[0]} is not there" if gone else "its code is unlike that of any version in the matrix"


def _difference(targets: Iterable[str], found: Mapping[str, str | None], cell: Cell, version: str | None) -> str:
    """The first of these targets that differs from the row, with both fingerprints."""
    target = next((target for target in targets if found.get(target) != cell.seams.get(target)), next(iter(found), "?"))
    here, expected = found.get(target), cell.seams.get(target)
    return f"{target} differs from the code of {version} (found {here}, expected {expected})"


def _as_listed(row: Row, cell: Cell, matrix: Matrix, found: Mapping[str, str | None]) -> Decision:
    reason = cell.reason or f"tested: {cell.tested}"
    if cell.verdict is not Verdict.PATCH or cell.tested == "behaviour" or matrix.declares(row.framework, row.version):
        return Decision(cell.verdict, reason, "", row.version, found)
    note = f"outside the declared range {matrix.declared[row.framework]}: read, not run"
    return Decision(cell.verdict, f"{cell.reason}; {note}" if cell.reason else note, "", row.version, found, ran=False)


def _like_known(known: Row, cell: Cell, why: str, version: str | None, found: Mapping[str, str | None]) -> Decision:
    if known.source:
        reason = f"calls itself {version}, and its code is that of {known.source}"
        return Decision(cell.verdict, f"{reason}: {cell.reason}" if cell.reason else reason, "", version, found)
    if cell.verdict is Verdict.PATCH:
        text = f"{why}, but its code is that of {known.version}"
        return Decision(Verdict.UNKNOWN, text, "", version, found)
    return Decision(cell.verdict, f"same code as {known.version}: {cell.reason}", "", version, found)


def _unlisted(feature: Feature, row: Row | None, version: str | None) -> str:
    """In words, why no cell decides."""
    if version is None:
        return "it is not installed as a distribution, so no row speaks of it"
    if row is None:
        return f"no row for {version}"
    cell = row.cells.get(feature.ability)
    if cell is None:
        return f"the row of {version} has no cell for {feature.ability}"
    if cell.verdict in (Verdict.UNKNOWN, Verdict.ABSENT):
        return f"the row of {version} says {cell.verdict.value}"
    return f"it calls itself {version}"


def _never_there(feature: Feature, matrix: Matrix) -> set[str]:
    """The targets that no release which is patched has, such as a method that a class inherits."""
    patched = [cell.seams for _, cell in matrix.known_code(feature.name) if cell.verdict is Verdict.PATCH]
    return {target for target in feature.targets if patched and not any(seams.get(target) for seams in patched)}


def _mismatch(
    feature: Feature,
    cell: Cell | None,
    why: str,
    version: str | None,
    found: Mapping[str, str | None],
    never_there: set[str],
    source: SourceTree,
) -> Decision:
    if cell is None:
        gone = [target for target, digest in found.items() if digest is None and target not in never_there]
        detail = f"{gone[0]} is not there" if gone else "its code is unlike that of any version in the matrix"
        reason = f"{why}, and {detail}"
        step = "Run `wanshim matrix` for the versions known, or open an issue with this line"
    else:
        reason = _difference(cell.seams, found, cell, version)
        step = f"Reinstall {feature.framework} {version}, or take out the local change in {source.root}"
    return Decision(Verdict.REFUSE, reason, step, version, found, known=False)
