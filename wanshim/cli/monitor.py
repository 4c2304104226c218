"""`wanshim monitor`: training runs in the terminal, on a page, as an exit status, or for another dashboard."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from wanshim import settings
from wanshim.errors import LogUnreadable, WanshimError
from wanshim.values import checked_seconds

if TYPE_CHECKING:  # every command imports this file, and only this one reads logs
    from wanshim.monitor.health import Patience
    from wanshim.monitor.runs import RunFolder

MOST_NAMES = 20  # in an error


def monitor(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Logs of runs: WANSHIM_PROGRESS_DIR of the training.")],
    serve: Annotated[bool, typer.Option("--serve", help="A page instead of the terminal view.")] = False,
    host: Annotated[str, typer.Option(help="Another address asks for a token: WANSHIM_MONITOR_TOKEN.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 7010,
    check: Annotated[bool, typer.Option("--check", help="Exit status 1 unless all is well; for cron.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The status of every run, once, as JSON.")] = False,
    export: Annotated[Optional[str], typer.Option(help="csv or tensorboard, into --output.")] = None,  # noqa: UP045
    output: Annotated[Path, typer.Option(help="For --export.")] = Path("exported"),
    run: Annotated[Optional[str], typer.Option(help="This run only, by its folder's name.")] = None,  # noqa: UP045
    stall_medians: Annotated[float, typer.Option(help="Silence that is a stall, in median steps.")] = 10.0,
    stall_floor: Annotated[float, typer.Option(help="... but never less than this many seconds.")] = 60.0,
) -> None:
    """Watch training runs: steps, ETA, loss, GPUs, stalls."""
    from wanshim.monitor import status
    from wanshim.monitor.health import Patience

    if not 0 < stall_medians < float("inf"):
        raise WanshimError(f"--stall-medians {stall_medians}", expected="a number above zero, such as 10")
    patience = Patience(stall_medians, checked_seconds(stall_floor, "--stall-floor"))
    if serve:
        _serve(folder, host, port, patience)
        return
    runs = _open(folder, run)
    if check or as_json or export:
        runs.update_fully()
        missing = _export(runs, export, output) if export else []
        statuses = status.of_folder(runs, patience)
        if as_json:
            typer.echo(json.dumps({"runs": statuses, "runs_left_out": len(runs.left_out)}, indent=2))
        if check:
            missing += [f"{run['id']}: {p['kind']}: {p['message']}" for run in statuses for p in run["problems"]]
        if check or export:
            missing += _not_read(runs, statuses)
        for line in missing:
            typer.echo(line, err=as_json or not check)
        if missing:
            raise typer.Exit(1)
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
            there = runs.names()
            more = f" and {len(there) - MOST_NAMES} more" if len(there) > MOST_NAMES else ""
            known = ", ".join(there[:MOST_NAMES]) or "none yet"
            raise WanshimError(f"no run {text(name)!r}", expected=f"one of {known}{more}")
    return runs


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


def _export(runs: RunFolder, kind: str, output: Path) -> list[str]:
    """Write every run's files; what could not be read, a line each."""
    from wanshim.monitor.export import EXPORTS

    if kind not in EXPORTS:
        raise WanshimError(f"--export {kind}", expected=" or ".join(EXPORTS))
    missing = []
    for run in runs.runs.values():
        try:
            for path in EXPORTS[kind](run, output / run.id):
                typer.echo(str(path))
        except LogUnreadable as error:
            missing.append(f"{run.id}: unread: {error}")
    return missing


def _serve(folder: Path, host: str, port: int, patience: Patience) -> None:
    from wanshim.monitor.runs import RunFolder

    try:
        from wanshim.monitor import server
    except ImportError as error:
        raise WanshimError(f"{error.name} is not installed", hint="pip install 'wanshim[monitor]'") from None
    token, made = settings.read().monitor_token, False
    if token is None and not server.is_local(host):
        token, made = secrets.token_urlsafe(24), True
    server.check_token(token, host)
    runs = RunFolder(folder, may_come=True)
    with server.listen(host, port) as listening:
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
        if made:
            address += f"?token={token}"
        elif token is not None:
            address += "?token=... (the value of WANSHIM_MONITOR_TOKEN)"
        typer.echo(address)
        if not folder.exists():
            typer.echo(f"{folder} does not exist yet: its runs are shown once it does", err=True)
        server.serve(runs, host, listening, patience, token)
