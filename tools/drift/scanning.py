"""One release against the matrix, feature by feature; and the releases that it has no row for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from packaging.version import Version

from tools.drift.compare import Change, FeatureChange, compare, nearest, with_diffs
from tools.drift.library import Library
from tools.drift.release import Release
from wanshim.errors import WanshimError
from wanshim.patching.verdict import Verdict
from wanshim.select.catalog import Catalog
from wanshim.select.matrix import Matrix


def scan(release: Release, known: Catalog, matrix: Matrix, library: Library) -> Iterator[FeatureChange]:
    """Every feature of the release's framework, with diffs where the known row's source is available."""
    for feature in known.features.values():
        if feature.framework != release.framework:
            continue
        row = nearest(matrix, feature, release)
        result = compare(feature, matrix, release, row)
        if row is not None and any(seam.change in (Change.CHANGED, Change.MOVED) for seam in result.seams):
            # Offline there may be nothing to compare with: then the changes stand without their text.
            with suppress(WanshimError):
                result = with_diffs(result, release, library.of_row(row[0]))
        yield result


def is_judged(change: FeatureChange, matrix: Matrix) -> bool:
    """Whether a person has judged this release: its row is there, not `unknown`, and rests on this very code."""
    framework, ability = change.feature.split(".", 1)
    row = matrix.row(framework, change.release)
    cell = row.cells.get(ability) if row is not None else None
    if cell is None or cell.verdict is Verdict.UNKNOWN:
        return False
    return all(change.fingerprints.get(target) == digest for target, digest in cell.seams.items())


def releases_without_row(matrix: Matrix, framework: str, releases: Iterable[Version]) -> list[Version]:
    """Those from the framework's first row on, ascending; all of them where it has no row. A build such as 2.13.0+cpu
    is of its release."""
    rows = {Version(row.version) for row in matrix.of(framework) if not row.source}
    found = {version for version in releases if version not in rows and Version(version.public) not in rows}
    return sorted(version for version in found if version >= min(rows, default=version))
