"""Records of what wanshim did: printed by `wanshim.report()`, `wanshim doctor`, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from wanshim.errors import FeatureUnavailable
from wanshim.settings import FAST


@dataclass(frozen=True)
class SeamRow:
    """One place in foreign code: where, in which state, how often called, and how often without effect, by reason or by
    an error."""

    target: str
    state: str
    calls: int
    note: str = ""
    fallbacks: dict[str, int] = field(default_factory=dict)
    failed_calls: int = 0

    @property
    def outcome(self) -> str:
        """State and calls in words."""
        return _outcome(self.state, self.calls, self.failed_calls, self.fallbacks)


NOT_NAMED = ("auto", "all", FAST, "--fast")  # what selects features that the user did not name
AUTO_WITH = "auto with "  # and this, before a variable: `auto` selects it because that one is on


def is_named_by(selected_by: str) -> bool:
    """Whether what has selected a feature names it."""
    return selected_by not in NOT_NAMED and not may_fail(selected_by)


def may_fail(selected_by: str) -> bool:
    """Whether strict accepts that a feature is not in place: it came with another one."""
    return selected_by.startswith(AUTO_WITH)


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
    origin: str = ""  # the distribution and version of a third party that the feature comes from; "": wanshim
    traceback: str = ""
    seams: tuple[SeamRow, ...] = ()
    notes: tuple[str, ...] = ()  # what the feature said while it ran, such as the plan of a split
    fallbacks: dict[str, int] = field(default_factory=dict)  # of `calls`: left to the framework, by reason
    failed_calls: int = 0  # of `calls`: ended in an error
    headline: str = ""  # the note that the whole report begins with
    closing: str = ""  # what its line has beside its calls

    @property
    def named(self) -> bool:
        """Whether the user asked for it by name, framework, ability or variable."""
        return self.selected_by is not None and is_named_by(self.selected_by)

    @property
    def named_in_list(self) -> bool:
        """Whether an item of WANSHIM_FEATURES, `-f` or `activate` names it, and no variable of its own."""
        return self.named and self.selected_by in (self.feature, *self.feature.split(".", 1))

    @property
    def modules(self) -> tuple[str, ...]:
        """Those that its seams are in, in their order."""
        return tuple(dict.fromkeys(seam.target.partition(":")[0] for seam in self.seams))

    @property
    def outcome(self) -> str:
        """State and calls in words. An automatic fix that was never called was not needed: nothing is wrong."""
        if self.state == "applied":
            return "applied, never called" if self.named else "not needed in this run"
        if self.state == "not needed":
            return "not needed in this run"
        called = [seam.target.rpartition(":")[2] for seam in self.seams if seam.calls]
        of = " and ".join(called) if len(called) < 3 else f"{len(called)} functions"
        outcome = _outcome(self.state, self.calls, self.failed_calls, self.fallbacks, of)
        return f"{outcome}; {self.closing}" if self.closing else outcome

    @property
    def violation(self) -> str | None:
        """The reason for which strict does not accept this row, or None: that it failed or was displaced, and, of a
        feature that the user named, that it is not in place or had no effect. One that came with another may fail."""
        broken, done = ("failed", "displaced"), ("exercised", "not needed", "native")
        must_stay = self.selected_by is None or not may_fail(self.selected_by)
        if (self.state in broken and must_stay) or (self.named and self.state not in done):
            return f"{self.feature} was selected by {self.selected_by} and is {self.outcome}: {self.reason}"
        return None


def _outcome(state: str, calls: int, failed: int, fallbacks: Mapping[str, int], of: str = "") -> str:
    counts = (f"{count} time{'s' * (count != 1)}: {reason}" for reason, count in fallbacks.items())
    left = f"left to the framework {'; '.join(counts)}" if fallbacks else ""
    if state == "ineffective" and left and not failed:
        return left
    name = "without effect" if state == "ineffective" else state
    counted = f"{calls} call{'s' * (calls != 1)}{f' of {of}' if of else ''}"
    called = f"{name}, {counted}" if calls else name
    parts = ", ".join(filter(None, (f"{failed} failed" if failed else "", left)))
    return f"{called}, of which {parts}" if parts else called


def check(rows: Iterable[ReportRow]) -> None:
    """Raises FeatureUnavailable if strict does not accept what became of one of these features."""
    for row in rows:
        if row.violation is not None:
            raise FeatureUnavailable(
                row.violation,
                expected="that it is in place and had its effect" if row.named else "that it stays in place",
                hint="Run `wanshim doctor` to see every seam",
            )


class Report:
    """All features wanshim knows, in the catalog's order.

    A row is worked out when it is first looked at, which reads the framework's source: `activate()` returns a report
    without reading anything, and one row does not read every framework.
    """

    def __init__(
        self, features: Iterable[str], row_of: Callable[[str], ReportRow], *, selected: Iterable[str], note: str = ""
    ) -> None:
        self._features = tuple(features)
        self._selected = frozenset(selected)
        self._row_of = cache(row_of)
        self.active = bool(self._selected)
        self.note = note

    @property
    def rows(self) -> tuple[ReportRow, ...]:
        return tuple(map(self._row_of, self._features))

    def row(self, feature: str) -> ReportRow:
        """The row of one feature; KeyError where there is none."""
        if feature not in self._features:
            raise KeyError(feature)
        return self._row_of(feature)

    @property
    def selected(self) -> tuple[ReportRow, ...]:
        return tuple(self._row_of(feature) for feature in self._features if feature in self._selected)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"active": self.active, "note": self.note, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [self.note] if self.note else []
        lines += [f"{row.feature}: {row.headline}" for row in self.rows if row.headline]
        for row in self.rows:
            version = row.version or "-"
            origin = f", from {row.origin}" if row.origin else ""
            found = f"{row.feature} ({row.framework} {version}{origin})"
            lines.append(f"{found}: {row.verdict}, {row.outcome}; {row.reason}")
            lines += [f"    {seam.target}: {seam.outcome}{seam.note}" for seam in row.seams]
            lines += ["    " + line for note in row.notes for line in note.splitlines()]
        return "\n".join(lines) or "no features selected"
