"""`wanshim matrix`: the verdicts of compat_matrix.yaml, in words or as JSON. In words, for the documents too: runs of
releases with one verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from wanshim.cli.main import as_json
from wanshim.errors import WanshimError
from wanshim.select.matrix import Matrix, Row, load

SHORT = 4  # so many versions are named one by one


@click.command()
@click.argument("frameworks", nargs=-1)
@as_json
def matrix(frameworks: tuple[str, ...], as_json: bool) -> None:
    """List the releases of each feature by verdict: patched, native or refused. Frameworks: such as diffsynth;
    all of them by default."""
    loaded = load()
    named = [_framework(name, loaded) for name in frameworks or loaded.declared]
    if as_json:
        found = [record for record in records(loaded) if record["framework"] in named]
        click.echo(json.dumps(found, indent=2))
    else:
        for line in lines(loaded, named):
            click.echo(line)


def _framework(name: str, loaded: Matrix) -> str:
    """As users write it: vllm-omni and DiffSynth-Studio too."""
    written = name.lower().replace("-", "_").removesuffix("_studio")
    if written not in loaded.declared:
        raise WanshimError(f"no framework {name!r} in the matrix", expected=f"one of {', '.join(loaded.declared)}")
    return written


def releases(rows: Sequence[Row]) -> str:
    if len(rows) <= SHORT:
        return ", ".join(row.version for row in rows)
    return f"{rows[0].version} to {rows[-1].version} ({len(rows)} releases)"


def tested(rows: Sequence[Row], ability: str) -> str:
    """A description of how the rows' verdicts on the ability were tested: `behaviour: 2.0.0; probe: the other 31`."""
    parts = []
    for how in ("behaviour", "probe", "nothing"):
        versions = [row.version for row in rows if row.cells[ability].tested == how]
        if versions:
            named = ", ".join(versions) if len(versions) <= SHORT else f"the other {len(versions)}"
            parts.append(how if len(versions) == len(rows) else f"{how}: {named}")
    return "; ".join(parts)


def lines(matrix: Matrix, frameworks: Sequence[str]) -> Iterator[str]:
    """A framework's features, and below each the releases by verdict."""
    for framework in frameworks:
        rows = list(matrix.of(framework))
        yield f"{framework}: {releases(rows)}, meant for {matrix.declared[framework]}"
        for ability in sorted({ability for row in rows for ability in row.cells}):
            yield f"  {framework}.{ability}"
            for members in matrix.spans(framework, ability):
                cell = members[0].cells[ability]
                reason = f": {cell.reason}" if cell.reason else ""
                yield f"    {releases(members)}: {cell.verdict.value}{reason} [{tested(members, ability)}]"
        yield ""


def records(matrix: Matrix) -> list[dict[str, Any]]:
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
