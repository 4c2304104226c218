"""One page a feature: what it does, how it is switched on, its ledger, and every version's verdict."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from wanshim import settings
from wanshim.patching import Feature, Kind, Seam
from wanshim.select.catalog import features_of
from wanshim.select.matrix import Cell, Matrix, Row
from writers.markdown import table

DOCS = Path(__file__).parent.parent
FOLDER = DOCS / "features"
GUIDES = ("how-to", "explanation")
MARK = "<!-- written by docs/generate.py from the adapter and compat_matrix.yaml: change those, then `make docs` -->"
KINDS = {
    Kind.CLOSURE: "a plain function in its place",
    Kind.WRAPT: "a wrapt wrapper, on the host side only",
    Kind.VALUE: "another value",
}


def path_of(feature: str) -> Path:
    return FOLDER / f"{feature}.md"


def page(feature: Feature, matrix: Matrix) -> str:
    """The whole page, as Markdown."""
    return "\n".join(
        [
            f"# {feature.name}",
            "",
            MARK,
            "",
            f"{feature.summary[0].upper()}{feature.summary[1:]}.",
            *_explained(feature),
            *_switch(feature),
            *_ledger(feature),
            *_verdicts(feature, matrix),
            "",
        ]
    )


def _explained(feature: Feature) -> Iterator[str]:
    """The adapter's own words, then the guides that speak of the feature."""
    folder = f"wanshim.adapters.{feature.framework}."
    (module,) = (m for name, m in sys.modules.items() if name.startswith(folder) and feature in features_of(m))
    yield from ("", "## What it does", "", (module.__doc__ or "").strip())
    guides = [path for folder in GUIDES for path in sorted((DOCS / folder).glob("*.md")) if _speaks_of(path, feature)]
    if guides:
        links = (f"[{_title(path)}](../{path.relative_to(DOCS).as_posix()})" for path in guides)
        yield from ("", f"Pages that speak of it: {', '.join(links)}.")


def _speaks_of(guide: Path, feature: Feature) -> bool:
    return f"`{feature.name}`" in guide.read_text(encoding="utf-8")


def _title(guide: Path) -> str:
    return guide.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _switch(feature: Feature) -> Iterator[str]:
    yield from ("", "## How it is switched on", "")
    if feature.auto:
        yield f"- `auto`, the default, selects it; `WANSHIM_FEATURES=-{feature.name}` leaves it out"
    else:
        yield f"- by name: `WANSHIM_FEATURES={feature.name}`, or `wanshim.activate('{feature.name}')`"
    if feature.switches:
        names = [name for switch in feature.switches for name in settings.names_of(switch)]
        beside = f", beside `{settings.names_of(feature.along_with)[0]}`" if feature.along_with else ""
        yield "- by its variable: " + " or ".join(f"`{name}`" for name in names) + beside
    if feature.auto_with:
        with_it = settings.names_of(feature.auto_with)[0]
        yield f"- `auto` selects it where `{with_it}` is on and no variable of its own is set"
    if feature.needs_devices:
        yield f"- it takes {feature.needs_devices} GPUs where `WANSHIM_DEVICES` names none"
    if feature.blocked is not None:
        yield "- `wanshim doctor` says where this machine or these settings cannot have it, and why"


def _ledger(feature: Feature) -> Iterator[str]:
    yield from ("", "## What it changes", "", "All of these go in, or none does." if feature.seams else "Nothing.")
    for seam in feature.seams:
        yield from _seam(seam)
    if feature.families:
        yield from (
            "",
            f"{', '.join(feature.families)}: if one's code is not known, it is left out, and the others go on.",
        )
    if feature.relies_on:
        yield from ("", "It does not change, but counts on, and checks with the same fingerprints:", "")
        yield from (f"- `{target}`" for target in feature.relies_on)


def _seam(seam: Seam) -> Iterator[str]:
    traits = [KINDS[seam.kind]]
    traits += ["reached by `torch.compile`"] if seam.in_graph else []
    traits += [] if seam.required else ["passed over where it is missing"]
    traits += ["whatever its code"] if seam.passes_through else []
    traits += ["shares it with other features"] if seam.stacks else []
    yield from ("", f"### `{seam.qualname}`", "", f"In `{seam.module}`: {', '.join(traits)}.", "")
    yield f"- why: {seam.why}"
    yield f"- upstream: {seam.upstream}"
    yield f"- remove when: {seam.remove_when}"
    if seam.kind is Kind.CLOSURE:
        yield f"- a closure because: {seam.closure_because or 'torch.compile can reach it'}"


def _verdicts(feature: Feature, matrix: Matrix) -> Iterator[str]:
    rows = [row for row in matrix.of(feature.framework) if feature.ability in row.cells]
    yield from ("", "## Which versions", "")
    if not rows:
        yield "No version has a row yet: the probe alone decides."
        return
    lines = []
    first: dict[tuple[tuple[str, str | None], ...], str] = {}
    for row in rows:
        cell = row.cells[feature.ability]
        reason = cell.reason.replace("|", "\\|")
        alike = first.setdefault(tuple(cell.seams.items()), row.version)
        lines.append((row.version, cell.verdict.value, _tested(row, cell), _code(cell, row, alike), reason))
    yield from (
        table("version | verdict | tested | its code | reason", lines),
        "",
        "[The compat matrix](../reference/compat_matrix.md) says what the verdicts mean and what was tested.",
    )


def _tested(row: Row, cell: Cell) -> str:
    if cell.tested != "behaviour":
        return cell.tested
    command = f"; `make matrix ROW={row.tox_environment}`" if row.tox else ""
    passed = f"; {cell.passed} passed on {row.ran['date']}, commit {row.ran['commit'][:7]}" if cell.passed else ""
    return f"behaviour by {', '.join(f'`{name}`' for name in cell.tests)}{command}{passed}"


def _code(cell: Cell, row: Row, alike: str) -> str:
    if not any(cell.seams.values()):
        return "not there"
    return "its own" if alike == row.version else f"that of {alike}"
