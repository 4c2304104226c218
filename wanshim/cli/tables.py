"""How the command line shows records: tables for people, plain data for `--json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wanshim import settings
from wanshim.diagnosis import Diagnosis
from wanshim.drift.compare import FeatureChange
from wanshim.matrix import Matrix
from wanshim.patching.feature import Feature

COLOURS = {"patch": "green", "native": "cyan", "unknown": "yellow", "refuse": "red", "absent": "dim"}


def print_diagnosis(result: Diagnosis, console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("feature, version", no_wrap=True)
    table.add_column("verdict, state", no_wrap=True)
    table.add_column("reason, next step", ratio=1)
    for row in result.rows:
        colour = COLOURS[row.verdict]
        state = f"{row.state} by {row.selected_by}" if row.selected_by else row.state
        version = row.version or "not installed"
        table.add_row(
            f"{row.feature}\n[dim]{row.framework} {version}[/dim]" + (f"\nfrom {row.origin}" if row.origin else ""),
            f"[{colour}]{row.verdict}[/{colour}]\n{state}",
            "\n".join(escape(part) for part in (row.reason, row.next_step) if part),
        )
    console.print(table)
    if result.note:
        console.print(f"[yellow]{escape(result.note)}[/yellow]", soft_wrap=True)
    for finding in result.unreached:
        console.print(
            f"[yellow]not reached: {escape(finding.found)}. {escape(finding.advice)}.[/yellow]", soft_wrap=True
        )
    for name, near in result.misspelt.items():
        console.print(f"[red]nothing reads {escape(name)}; did you mean {near}?[/red]", soft_wrap=True)
    if result.missing:
        console.print(f"[red]requested but unavailable: {', '.join(result.missing)}[/red]", soft_wrap=True)


def print_features(features: Iterable[Feature], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("feature", no_wrap=True)
    table.add_column("switched on by", no_wrap=True)
    table.add_column("what it does", ratio=1)
    for feature in features:
        names = [settings.VARIABLES[switch][0][0] for switch in feature.switches]
        table.add_row(feature.name, "auto" if feature.auto else ("\n".join(names) or "name"), feature.summary)
    console.print(table)


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


def print_matrix(matrix: Matrix, console: Console) -> None:
    table = Table("framework", "version", "feature", "verdict", "tested", "reason", box=SIMPLE_HEAD, pad_edge=False)
    for record in matrix_records(matrix):
        colour = COLOURS[record["verdict"]]
        table.add_row(
            record["framework"],
            record["version"],
            record["feature"],
            f"[{colour}]{record['verdict']}[/{colour}]",
            record["tested"],
            escape(record["reason"]),
        )
    console.print(table)


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
