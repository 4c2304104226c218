"""compat_matrix.yaml against what upstream released: scan a release for drift, list those without a row, verify all.

python tools/matrix.py scan diffsynth    missing, verify: --help says more
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.drift import scanning, verification
from tools.drift import table as tabular
from tools.drift.compare import FeatureChange
from tools.drift.download import versions
from tools.drift.library import Library
from tools.drift.release import framework_of
from wanshim.cli.main import PATH, as_json, entry
from wanshim.errors import WanshimError
from wanshim.select import catalog, matrix

COLOURS = {"patch": "green", "native": "cyan", "unknown": "yellow", "refuse": "red", "absent": "dim"}
UNREAD = 3  # exit status: what was read is as the table has it, but not all could be read

console = Console()

wheels = click.option("--wheel", type=PATH, multiple=True, help="A wheel, or a folder of wheels. Repeatable.")
offline_option = click.option("--offline", is_flag=True, help="Download nothing.")
table_option = click.option("--table", type=PATH, help="Another compat_matrix.yaml.")


@click.group(no_args_is_help=True)
def app() -> None:
    """Hold releases against compat_matrix.yaml."""


@app.command()
@click.argument("packages", nargs=-1)
@wheels
@click.option("--folder", type=PATH, help="A package's own folder, such as src/fastvideo.")
@click.option("--as", "called", help="The version that the folder stands for.")
@click.option("--write/--no-write", help="Add rows, with the verdict `unknown`, for a person to judge.")
@click.option("--check/--no-check", help="Exit status 1 where a release has no judged row.")
@offline_option
@table_option
@as_json
def scan(
    packages: tuple[str, ...],
    wheel: tuple[Path, ...],
    folder: Path | None,
    called: str | None,
    write: bool,
    check: bool,
    offline: bool,
    table: Path | None,
    as_json: bool,
) -> None:
    """Hold releases against the matrix, seam by seam, with the diff of what changed. Reads wheels and source
    folders; installs and imports nothing. Without packages, wheels or a folder: the newest release of each
    framework. A folder without --as is held against the row whose code it has, or else the newest."""
    if write and folder is not None and called is None:
        raise WanshimError(f"no version for {folder}", hint="Give its row one with --as, such as 1.2+COMMIT")
    path = table or matrix.path_of_own_matrix()
    loaded = matrix.load(path)
    known = catalog.discover()
    with TemporaryDirectory(prefix="wanshim-") as place:
        library = Library(known.frameworks, Path(place), online=not offline)
        releases = library.add_wheels(wheel)
        if folder is not None:
            releases.append(library.add_folder(folder, called))
        named = list(packages) or ([] if releases else [f.distribution for f in known.frameworks.values()])
        releases += [library.find(name) for name in named]
        changes = [change for release in releases for change in scanning.scan(release, known, loaded, library)]
    if as_json:
        click.echo(json.dumps([asdict(change) for change in changes], indent=2, default=str))
    else:
        _print_changes(changes)
    if write:
        tabular.save(tabular.add_rows(loaded, changes, releases), path)
        console.print(f"written to {path}; run `make docs`")
    if check and any(not scanning.is_judged(change, loaded) for change in changes):
        raise SystemExit(1)


def _print_changes(changes: list[FeatureChange]) -> None:
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


@app.command()
@click.argument("packages", nargs=-1)
@table_option
def missing(packages: tuple[str, ...], table: Path | None) -> None:
    """List the releases, pre-releases too, that the index has and the table has no row for, from a framework's first
    row on. Exit status 1 where there is one."""
    loaded = matrix.load(table or matrix.path_of_own_matrix())
    known = catalog.discover().frameworks.values()
    named = [framework_of(name, known) for name in packages] or list(known)
    lacking = False
    for framework in named:
        releases = scanning.releases_without_row(loaded, framework.name, versions(framework.distribution))
        lacking = lacking or bool(releases)
        found = ", ".join(map(str, releases)) or "every release has a row"
        console.print(f"{framework.distribution}: {found}", highlight=False, soft_wrap=True)
    if lacking:
        console.print("Read one with `python tools/matrix.py scan PACKAGE==VERSION`, add its row with --write")
        raise SystemExit(1)


@app.command()
@click.argument("frameworks", nargs=-1)
@wheels
@offline_option
@table_option
def verify(frameworks: tuple[str, ...], wheel: tuple[Path, ...], offline: bool, table: Path | None) -> None:
    """Derive every fingerprint of the table again from the releases, and hold each verdict against what the other rows
    and the adapters' judges say of the code. Exit status 1 on any difference; 3 where there is none, but releases could
    not be fetched."""
    loaded = matrix.load(table or matrix.path_of_own_matrix())
    unknown = sorted(set(frameworks) - set(loaded.declared))
    if unknown:
        raise WanshimError(f"the table has no framework {unknown[0]!r}", expected="of " + ", ".join(loaded.declared))
    rows = [row for row in loaded.rows if not frameworks or row.framework in frameworks]
    known = catalog.discover()
    differences, count = 0, 0
    unread: dict[str, list[verification.Unread]] = {}
    with TemporaryDirectory(prefix="wanshim-") as place:
        library = Library(known.frameworks, Path(place), online=not offline)
        library.add_wheels(wheel)
        for found in verification.verify(loaded, library.of_row, rows, known.features.values()):
            if isinstance(found, verification.Unread):
                unread.setdefault(found.cause, []).append(found)
            elif isinstance(found, verification.Difference):
                differences += 1
                console.print(str(found), style="red", highlight=False, markup=False, soft_wrap=True)
            else:
                count += 1
    for first, *others in unread.values():
        more = f" ({len(others)} more rows likewise)" if others else ""
        console.print(f"not read: {first}{more}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    not_read = f", {sum(map(len, unread.values()))} rows not read" if unread else ""
    console.print(f"{count} rows read, {differences} differences{not_read}", highlight=False)
    if differences:
        raise SystemExit(1)
    if unread:
        raise SystemExit(UNREAD)


if __name__ == "__main__":
    entry(app)
