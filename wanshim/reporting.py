"""What wanshim did, as records: printed by `wanshim.report()`, `wanshim doctor`, and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class SeamRow:
    """One place in foreign code: where, in which state, how often called."""

    target: str
    state: str
    calls: int
    note: str = ""


@dataclass(frozen=True)
class ReportRow:
    """One feature: what was decided about it, what became of it, and why."""

    feature: str
    framework: str
    version: str | None
    selected_by: str | None
    verdict: str
    state: str
    calls: int
    reason: str
    next_step: str = ""
    traceback: str = ""
    seams: tuple[SeamRow, ...] = ()
    notes: tuple[str, ...] = ()  # what the feature said while it ran, such as the plan of a split


class Report:
    """All features wanshim knows, in the catalog's order.

    The rows are worked out at the first look: `activate()` returns a report without reading the matrix, so
    that a program that never looks does not pay for it.
    """

    def __init__(self, rows: Callable[[], tuple[ReportRow, ...]], *, active: bool, note: str = "") -> None:
        self._compute = rows
        self.active = active
        self.note = note

    @cached_property
    def rows(self) -> tuple[ReportRow, ...]:
        return self._compute()

    def row(self, feature: str) -> ReportRow:
        """The row of one feature; KeyError where there is none."""
        for row in self.rows:
            if row.feature == feature:
                return row
        raise KeyError(feature)

    @property
    def selected(self) -> tuple[ReportRow, ...]:
        return tuple(row for row in self.rows if row.selected_by is not None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"active": self.active, "note": self.note, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [self.note] if self.note else []
        for row in self.rows:
            version = row.version or "-"
            calls = f", {row.calls} calls" if row.calls else ""
            lines.append(f"{row.feature} ({row.framework} {version}): {row.verdict}, {row.state}{calls}; {row.reason}")
            lines += [f"    {seam.target}: {seam.state}, {seam.calls} calls{seam.note}" for seam in row.seams]
            lines += ["    " + line for note in row.notes for line in note.splitlines()]
        return "\n".join(lines) or "no features selected"
