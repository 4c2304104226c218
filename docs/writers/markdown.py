"""The one way in which a table is written."""

from __future__ import annotations

from collections.abc import Iterable


def row(*cells: object) -> str:
    """None is an empty cell."""
    return f"| {' | '.join('' if cell is None else str(cell) for cell in cells)} |"


def table(heads: str, rows: Iterable[Iterable[object]], note: str = "") -> str:
    """Args: heads: the titles of the columns, with ` | ` between them; note: stands below."""
    lines = [f"| {heads} |", "|---" * (heads.count("|") + 1) + "|", *(row(*cells) for cells in rows)]
    return "\n".join([*lines, "", note] if note else lines)
