"""Every fingerprint of the matrix, derived again from the releases themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wanshim.drift.release import Release
from wanshim.errors import WanshimError
from wanshim.matrix import Matrix, Row


@dataclass(frozen=True)
class Difference:
    """A fingerprint of the table that the release does not have, or a release that cannot be read."""

    framework: str
    version: str
    target: str
    written: str | None
    derived: str | None
    problem: str = ""

    def __str__(self) -> str:
        place = f"{self.framework} {self.version}"
        if self.problem:
            return f"{place}: {self.problem}"
        return f"{place}: {self.target}: the table says {self.written}, the release {self.derived}"


def verify(matrix: Matrix, obtain: Callable[[Row], Release]) -> Iterator[Row | Difference]:
    """Yield each row when it has been read, and each difference found in it.

    Args:
        obtain: gives the source of a row, or raises WanshimError; that is a difference too.
    """
    for row in matrix.rows:
        if not any(cell.seams for cell in row.cells.values()):
            continue
        try:
            release = obtain(row)
        except WanshimError as error:
            yield Difference(row.framework, row.version, "", None, None, str(error))
            continue
        for cell in row.cells.values():
            for target, digest in cell.seams.items():
                derived = release.source.fingerprint(target)
                if derived != digest:
                    yield Difference(row.framework, row.version, target, digest, derived)
        yield row
