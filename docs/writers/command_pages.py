"""The reference of the command line, from the commands themselves; the same under every release of typer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from wanshim.cli import main
from writers.markdown import table

TYPERS_OWN = ("install_completion", "show_completion", "help")


def reference() -> str:
    """Every command with its arguments and options."""
    return "\n".join(_command(typer.main.get_command(main.app), "wanshim")).strip()


def _command(command: Any, name: str) -> Iterator[str]:
    below = getattr(command, "commands", {})
    parameters = [one for one in command.params if one.name not in TYPERS_OWN]
    usage = [name, "[OPTIONS]" if any(not _is_argument(one) for one in parameters) else ""]
    usage += ["COMMAND" if below else "", *(_metavar(one) for one in parameters if _is_argument(one))]
    yield from (f"## `{name}`", "", inspect.cleandoc(command.help or "").strip(), "")
    yield from ("```", " ".join(filter(None, usage)), "```", "")
    if parameters:
        yield from (table("argument | meaning", map(_row, parameters)), "")
    for key, each in below.items():
        yield from _command(each, f"{name} {key}")


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _metavar(parameter: Any) -> str:
    shown = str(parameter.metavar or parameter.name.upper())
    return shown + "..." if parameter.nargs == -1 else shown


def _row(parameter: Any) -> tuple[str, str]:
    names = [_metavar(parameter)] if _is_argument(parameter) else [*parameter.opts, *parameter.secondary_opts]
    meaning = (parameter.help or "").replace("|", "\\|")
    default = parameter.default
    if isinstance(default, str | int | float | Path) and not isinstance(default, bool) and str(default):
        meaning += f" Default: `{default}`."
    return ", ".join(f"`{name}`" for name in names), meaning
