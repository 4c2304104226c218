"""`wanshim monitor`: training runs in the terminal, on a page, as an exit status, or for another dashboard."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wanshim import settings
from wanshim.cli.main import PATH
from wanshim.errors import LogUnreadable, WanshimError
from wanshim.values import checked_seconds

if TYPE_CHECKING:
    from wanshim.monitor.health import Patience
    from wanshim.monitor.runs import RunFolder

MOST_NAMES = 20  # in an error
_OF = {"host": "serve", "port": "serve", "output": "export"}  # options that mean nothing without another


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--serve", is_flag=True, help="A page instead of the terminal view.")
@click.option("--host", default="127.0.0.1", help="Another address asks for a token: WANSHIM_MONITOR_TOKEN.")
@click.option("--port", type=click.IntRange(0, 65535), default=7010, help="0: a free one.")
@click.option("--check", is_flag=True, help="Exit status 1 unless all is well; for cron.")
@click.option("--json", "as_json", is_flag=True, help="The status of every run, once, as JSON.")
@click.option("--export", help="csv or tensorboard, into --output.")
@click.option("--output", type=PATH, default=Path("exported"), help="For --export.")
@click.option("--run", help="This run only, by its folder's name.")
@click.option("--stall-medians", default=10.0, help="Silence that is a stall, in median steps.")
@click.option("--stall-floor", default=60.0, help="... but never less than this many seconds.")
def monitor(
    folder: Path,
    serve: bool,
    host: str,
    port: int,
    check: bool,
    as_json: bool,
    export: str | None,
    output: Path,
    run: str | None,
    stall_medians: float,
    stall_floor: float,
) -> None:
    """Watch training runs: steps, ETA, loss, GPUs, stalls. DIR has their logs: WANSHIM_PROGRESS_DIR of the training."""
    from wanshim.monitor import status
    from wanshim.monitor.health import Patience

    given = click.get_current_context()
    for name, needed in _OF.items():
        if given.get_parameter_source(name) is ParameterSource.COMMANDLINE and not given.params[needed]:
            raise WanshimError(f"--{name} without --{needed}", expected="both, or neither")
    if not 0 < stall_medians < float("inf"):
        raise WanshimError(f"--stall-medians {stall_medians}", expected="a number above zero, such as 10")
    patience = Patience(stall_medians, checked_seconds(stall_floor, "--stall-floor"))
    if serve:
        if check or as_json or export is not None:
            raise WanshimError(
                "--serve with --check, --json or --export", expected="a page, or one answer with its exit status"
            )
        _serve(folder, run, host, port, patience)
        return
    runs = _open(folder, run)
    if check or as_json or export is not None:
        runs.update_fully()
        missing = _export(runs, export, output, err=as_json) if export is not None else []
        statuses = status.of_folder(runs, patience)
        if as_json:
            click.echo(json.dumps({"runs": statuses, "runs_left_out": len(runs.left_out)}, indent=2))
        if check:
            missing += [f"{run['id']}: {p['kind']}: {p['message']}" for run in statuses for p in run["problems"]]
        if check or export is not None:
            missing += _not_read(runs, statuses)
        for line in missing:
            click.echo(line, err=as_json or not check)
        if missing:
            raise SystemExit(1)
    else:
        from rich.console import Console

        from wanshim.monitor import terminal

        terminal.watch(runs, patience, Console())


def _open(folder: Path, name: str | None) -> RunFolder:
    """The folder, or one run of it by its name; a name is looked up, never made into a path."""
    from wanshim.monitor.reading import text
    from wanshim.monitor.runs import RunFolder

    runs = RunFolder(folder, only=name)
    if name is not None:
        runs.update()
        if not runs.runs:
            raise WanshimError(f"no run {text(name)!r}", expected=f"one of {_names(runs)}")
    return runs


def _names(runs: RunFolder) -> str:
    there = runs.names()
    more = f" and {len(there) - MOST_NAMES} more" if len(there) > MOST_NAMES else ""
    return (", ".join(there[:MOST_NAMES]) or "none yet") + more


def _not_read(runs: RunFolder, statuses: list[dict[str, Any]]) -> Iterator[str]:
    """Runs that could not be read, which must not pass for healthy ones."""
    from wanshim.monitor.reading import text

    folder = text(str(runs.folder), 1000)
    if not statuses:
        yield f"{folder}: empty: no run has logged here"
    for run in statuses:
        if run["unread_bytes"]:
            yield f"{run['id']}: unread: {run['unread_bytes']} bytes of its logs are not read yet"
    if runs.left_out:
        count, some = len(runs.left_out), ", ".join(runs.left_out[:3])
        yield f"{folder}: left out: the {count} oldest runs ({some}, ...): name one with --run, or move them away"


def _export(runs: RunFolder, kind: str, output: Path, *, err: bool) -> list[str]:
    """Write every run's files, and their paths on one of the standard streams; what could not be read, a line each."""
    from wanshim.monitor.export import EXPORTS

    if kind not in EXPORTS:
        raise WanshimError(f"--export {kind}", expected=" or ".join(EXPORTS))
    missing = []
    for run in runs.runs.values():
        try:
            for path in EXPORTS[kind](run, output / run.id):
                click.echo(str(path), err=err)
        except LogUnreadable as error:
            missing.append(f"{run.id}: unread: {error}")
    return missing


def _serve(folder: Path, run: str | None, host: str, port: int, patience: Patience) -> None:
    from wanshim.monitor.reading import text
    from wanshim.monitor.runs import RunFolder

    try:
        from wanshim.monitor import server
    except ImportError as error:
        raise WanshimError(f"{error.name} is not installed", hint="pip install 'wanshim[monitor]'") from None
    token, made = settings.read().monitor_token, False
    if token is None and not server.is_local(host):
        token, made = secrets.token_urlsafe(24), True
    server.check_token(token, host)
    runs = RunFolder(folder, run, may_come=True)
    with server.listen(host, port) as listening:
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
        if made:
            address += f"?token={token}"
        elif token is not None:
            address += "?token=... (the value of WANSHIM_MONITOR_TOKEN)"
        click.echo(address)
        if not folder.exists():
            click.echo(f"{folder} does not exist yet: its runs are shown once it does", err=True)
        elif run is not None and run not in runs.names():
            click.echo(f"no run {text(run)!r} yet, which is shown once it logs; there: {_names(runs)}", err=True)
        server.serve(runs, host, listening, patience, token)
