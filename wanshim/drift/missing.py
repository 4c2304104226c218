"""Releases of the index that the table has no row for."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from wanshim.matrix import Matrix


def releases_without_row(matrix: Matrix, framework: str, releases: Iterable[Version]) -> list[Version]:
    """Those from the framework's first row on, ascending; all of them where it has no row."""
    rows = {Version(row.version) for row in matrix.of(framework) if not row.source}
    return sorted(version for version in releases if version not in rows and version >= min(rows, default=version))
