"""Every fingerprint of the matrix, derived again from the releases themselves, and every verdict from their code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tools.drift.release import Release
from tools.drift.unavailable import ReleaseUnavailable
from wanshim.errors import WanshimError
from wanshim.patching.feature import Feature
from wanshim.patching.verdict import Verdict
from wanshim.select.decision import judge_code
from wanshim.select.matrix import Matrix, Row


@dataclass(frozen=True)
class Difference:
    """A fingerprint of the table that the release does not have, or a row or a release that cannot be right."""

    framework: str
    version: str
    problem: str

    def __str__(self) -> str:
        return f"{self.framework} {self.version}: {self.problem}"


@dataclass(frozen=True)
class Unread:
    """A row whose release could not be fetched, so that nothing is known about it."""

    row: Row
    error: ReleaseUnavailable

    def __str__(self) -> str:
        return f"{self.row.framework} {self.row.version}: {self.error}"

    @property
    def cause(self) -> str:
        """The error without what names this one row."""
        return str(self.error).replace(self.row.commit.rpartition("@")[2] or self.row.version, "")


def verify(
    matrix: Matrix, obtain: Callable[[Row], Release], rows: Iterable[Row], features: Iterable[Feature]
) -> Iterator[Row | Difference | Unread]:
    """Yield each row when it has been read, and each difference found in it.

    Args:
        obtain: gives the source of a row, or raises ReleaseUnavailable; any other WanshimError is a difference.
        rows: those of the matrix that are read.
        features: with their judges: what they and the other rows say of a row's code must be its verdict, or a refusal.
    """
    features = list(features)
    for row in rows:
        if not any(cell.seams for cell in row.cells.values()):
            continue
        try:
            release = obtain(row)
        except ReleaseUnavailable as error:
            yield Unread(row, error)
            continue
        except WanshimError as error:
            yield Difference(row.framework, row.version, str(error))
            continue
        for cell in row.cells.values():
            for target, digest in cell.seams.items():
                derived = release.source.fingerprint(target)
                if derived != digest:
                    problem = f"{target}: the table says {digest}, the release {derived}"
                    yield Difference(row.framework, row.version, problem)
        for feature in features:
            if feature.framework == row.framework and feature.ability in row.cells:
                yield from _without_its_row(matrix, row, feature, release)
        yield row


def _without_its_row(matrix: Matrix, row: Row, feature: Feature, release: Release) -> Iterator[Difference]:
    """What users of such code met if its release were new."""
    verdict = row.cells[feature.ability].verdict
    right = {verdict, Verdict.REFUSE, Verdict.UNKNOWN if verdict is Verdict.PATCH else verdict}
    found = release.source.fingerprints(feature.targets)
    decision = judge_code(feature, matrix.without(row), release.source, row.version, found)
    if verdict is not Verdict.UNKNOWN and decision.verdict not in right:
        problem = f"{feature.name} is {verdict.value}, and without this row {decision.verdict.value}: {decision.reason}"
        yield Difference(row.framework, row.version, problem)
