"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from wanshim.cli import main


def reference() -> str:
    """Every command with its arguments and options."""
    return "\n".join(_command(typer.main.get_command(main.app), "wanshim")).strip()


def _command(command: Any, name: str) -> Iterator[str]:
    context = typer.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (
        f"## `{name}`",
        "",
        inspect.cleandoc(command.help or "").strip(),
        "",
        f"    {name} {usage}".rstrip(),
        "",
    )
    rows = list(_parameters(command, context))
    if rows:
        yield from ("| argument | meaning |", "|---|---|", *rows, "")
    for key, below in getattr(command, "commands", {}).items():
        yield from _command(below, f"{name} {key}")


def _parameters(command: Any, context: typer.Context) -> Iterator[str]:
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            names = f"`{parameter.make_metavar(context)}`"
        meaning = (getattr(parameter, "help", None) or "").replace("|", "\\|")
        default = parameter.default
        flag = getattr(parameter, "is_flag", False)
        if default not in (None, "", ()) and not callable(default) and not flag and "Default" not in meaning:
            meaning += f" Default: `{default}`."
        yield f"| {names} | {meaning.strip()} |"
