"""Releases of the index that the table has no row for."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from wanshim.select.matrix import Matrix


def releases_without_row(matrix: Matrix, framework: str, releases: Iterable[Version]) -> list[Version]:
    """Those from the framework's first row on, ascending; all of them where it has no row. A build such as 2.13.0+cpu
    is of its release."""
    rows = {Version(row.version) for row in matrix.of(framework) if not row.source}
    found = {version for version in releases if version not in rows and Version(version.public) not in rows}
    return sorted(version for version in found if version >= min(rows, default=version))
