"""How `wanshim matrix` shows records: lines for people, plain data for `--json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console

from wanshim.select.drift.compare import FeatureChange
from wanshim.select.matrix import Matrix

COLOURS = {"patch": "green", "native": "cyan", "unknown": "yellow", "refuse": "red", "absent": "dim"}


def matrix_records(matrix: Matrix) -> list[dict[str, Any]]:
    """One record a version and feature."""
    return [
        {
            "framework": row.framework,
            "version": row.version,
            "feature": f"{row.framework}.{ability}",
            "verdict": cell.verdict.value,
            "tested": cell.tested,
            "reason": cell.reason,
        }
        for row in matrix.rows
        for ability, cell in sorted(row.cells.items())
    ]


def print_changes(changes: Iterable[FeatureChange], console: Console) -> None:
    """One block a release and feature: what `doctor` would say there, then each seam, then its diff."""
    for change in changes:
        decision = change.decision
        colour = COLOURS[decision.verdict.value]
        against = f"against {change.against}" if change.against else "no known row"
        head = f"{change.feature} in {change.release} ({against}): [{colour}]{decision.verdict.value}[/{colour}]"
        console.print(f"{head}, {decision.reason}", highlight=False, soft_wrap=True)
        for seam in change.seams:
            moved = f" to {seam.moved_to}" if seam.moved_to else ""
            signature = ", its signature too" if seam.signature_changed else ""
            line = f"  {seam.change.value:<9} {seam.target}{moved}{signature}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        for seam in change.seams:
            if seam.diff:
                console.print(seam.diff, highlight=False, markup=False, soft_wrap=True)
