"""Which feature a contract test is about, by the tests that the cells of compat_matrix.yaml name: a row runs the files
of what it says `behaviour` of, and the closing table of `make matrix` counts by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from wanshim.select.matrix import Cell, Row


def is_named(name: str, file: str, test: str) -> bool:
    """Whether a cell's `name`, FILE or FILE::TEST, is of a test: its module's name, and its own without parameters."""
    in_file, _, in_test = name.partition("::")
    return fnmatchcase(file, in_file) and fnmatchcase(test, in_test or "*")


def ability_of(file: str, test: str, cells: Mapping[str, Cell]) -> str | None:
    """The ability whose cell names a test; None where none does: it is about all of them."""
    return next((a for a, cell in cells.items() if any(is_named(name, file, test) for name in cell.tests)), None)


def is_run(file: str, cells: Mapping[str, Cell], rows: Iterable[Row]) -> bool:
    """Whether a row with these cells runs `file`: a cell of its own names tests in it, or no cell of all `rows`."""
    return _names(file, cells) or not any(_names(file, row.cells) for row in rows)


def _names(file: str, cells: Mapping[str, Cell]) -> bool:
    return any(fnmatchcase(file, name.partition("::")[0]) for cell in cells.values() for name in cell.tests)


def proofs(cells: Mapping[str, Cell], tests: Sequence[tuple[tuple[str, str], bool]]) -> list[int]:
    """Places of the tests that prove a cell which says `behaviour` though they are slow: of each name in it whose tests
    are all slow, the first two.

    Args:
        tests: the module and name of each, and whether it is slow.
    """
    found = []
    for name in {name: None for cell in cells.values() if cell.tested == "behaviour" for name in cell.tests}:
        named = [(at, slow) for at, (test, slow) in enumerate(tests) if is_named(name, *test)]
        if all(slow for _, slow in named):
            found += [at for at, _ in named[:2]]
    return found
