"""`wanshim monitor`: training runs in the terminal, on a page, as an exit status, or for another dashboard."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from wanshim import settings
from wanshim.deadline import checked_seconds
from wanshim.errors import MonitorInvalid
from wanshim.monitor import status
from wanshim.monitor.health import Patience
from wanshim.monitor.runs import RunFolder

console = Console()


def monitor(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Logs of runs: WANSHIM_PROGRESS_DIR of the training.")],
    serve: Annotated[bool, typer.Option("--serve", help="A page instead of the terminal view.")] = False,
    host: Annotated[str, typer.Option(help="Another address asks for a token: WANSHIM_MONITOR_TOKEN.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 7010,
    check: Annotated[bool, typer.Option("--check", help="Exit status 1 where a run is in trouble; for cron.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The status of every run, once, as JSON.")] = False,
    export: Annotated[Optional[str], typer.Option(help="csv or tensorboard, into --output.")] = None,  # noqa: UP045
    output: Annotated[Path, typer.Option(help="For --export.")] = Path("exported"),
    run: Annotated[Optional[str], typer.Option(help="This run only, by its folder's name.")] = None,  # noqa: UP045
    stall_medians: Annotated[float, typer.Option(help="Silence that is a stall, in median steps.")] = 10.0,
    stall_floor: Annotated[float, typer.Option(help="... but never less than this many seconds.")] = 60.0,
) -> None:
    """Watch training runs: steps, ETA, loss, GPUs, stalls."""
    if not 0 < stall_medians < float("inf"):
        raise MonitorInvalid(f"--stall-medians {stall_medians}", expected="a number above zero, such as 10")
    patience = Patience(stall_medians, checked_seconds(stall_floor, "--stall-floor"))
    if serve:
        _serve(folder, host, port, patience)
    elif check or as_json or export:
        runs = _only(status.folder_of(folder), run)
        if export:
            _export(runs, export, output)
        _report(runs, patience, check=check, as_json=as_json)
    else:
        from wanshim.monitor import terminal

        terminal.watch(_only(RunFolder(folder), run), patience, console)


def _only(runs: RunFolder, name: str | None) -> RunFolder:
    """The folder of one run by its name; a name is looked up, never made into a path."""
    runs.update()
    if name is None:
        return runs
    if name not in runs.runs:
        raise MonitorInvalid(f"no run {name!r}", expected="one of " + (", ".join(sorted(runs.runs)) or "none yet"))
    one = RunFolder(runs.runs[name].folder)
    one.update_fully()
    return one


def _report(runs: RunFolder, patience: Patience, *, check: bool, as_json: bool) -> None:
    statuses = status.of_folder(runs, patience)
    if as_json:
        typer.echo(json.dumps({"runs": statuses}, indent=2))
    if check:
        for found in statuses:
            for problem in found["problems"]:
                typer.echo(f"{found['id']}: {problem['kind']}: {problem['message']}", err=as_json)
        if any(found["problems"] for found in statuses):
            raise typer.Exit(1)


def _export(runs: RunFolder, kind: str, output: Path) -> None:
    from wanshim.monitor.export import EXPORTS

    if kind not in EXPORTS:
        raise MonitorInvalid(f"--export {kind}", expected=" or ".join(EXPORTS))
    for found in runs.runs.values():
        for path in EXPORTS[kind](found, output / found.id):
            typer.echo(str(path))


def _serve(folder: Path, host: str, port: int, patience: Patience) -> None:
    try:
        from wanshim.monitor import server
    except ImportError as error:
        raise MonitorInvalid(f"{error.name} is not installed", hint="pip install 'wanshim[monitor]'") from None
    token = settings.read().monitor_token
    if token is None and not server.is_local(host):
        token = secrets.token_urlsafe(24)
    query = f"?token={token}" if token else ""
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"http://{shown}:{port}/{query}")
    server.serve(RunFolder(folder), host, port, patience, token)
