"""The reference of the command line, from the commands themselves; the same under every release of click."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from wanshim.cli import main
from writers.markdown import table


def reference() -> str:
    """Every command with its arguments and options."""
    return "\n".join(_command(main.app, "wanshim")).strip()


def _command(command: click.Command, name: str) -> Iterator[str]:
    context = click.Context(command)
    below = command.list_commands(context) if isinstance(command, click.Group) else []
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    options = [one for one in command.params if isinstance(one, click.Option)]
    usage = [name, "[OPTIONS]" if options else "", "COMMAND" if below else "", *map(_metavar, arguments)]
    yield from (f"## `{name}`", "", inspect.cleandoc(command.help or "").strip(), "")
    yield from ("```", " ".join(filter(None, usage)), "```", "")
    if options:
        yield from (table("option | meaning", map(_row, options)), "")
    for key in below:
        assert isinstance(command, click.Group)
        each = command.get_command(context, key)
        assert each is not None
        yield from _command(each, f"{name} {key}")


def _metavar(argument: click.Argument) -> str:
    shown = str(argument.metavar or (argument.name or "").upper())
    return shown + "..." if argument.nargs == -1 else shown


def _row(option: click.Option) -> tuple[str, str]:
    meaning = (option.help or "").replace("|", "\\|")
    default = option.default
    if isinstance(default, str | int | float | Path) and not isinstance(default, bool) and str(default):
        meaning += f" Default: `{default}`."
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts]), meaning
