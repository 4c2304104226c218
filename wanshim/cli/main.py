"""The command line: doctor, features, run, generate, warm, matrix, monitor, demo."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from wanshim import __version__
from wanshim.errors import WanshimError

FOREIGN_OPTIONS = {"allow_interspersed_args": False}  # what follows the first argument is another program's


class Commands(click.Group):
    """A group some of whose commands are imported when they are asked for.

    Args:
        elsewhere: by name, the module and the attribute of each of these.
    """

    def __init__(self, *args: Any, elsewhere: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.elsewhere = elsewhere

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self.elsewhere]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.elsewhere:
            return super().get_command(ctx, cmd_name)
        module, attribute = self.elsewhere[cmd_name].split(":")
        found: click.Command = getattr(import_module(module), attribute)
        return found


def entry(commands: click.Command | None = None) -> None:
    """Run the command; an error of ours, or of a file, is one message and exit status 2, not a traceback."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        if isinstance(stream, TextIOWrapper):  # a name that the locale cannot write, such as an umlaut under LC_ALL=C
            stream.reconfigure(errors="backslashreplace")
    try:
        status = (commands or app).main(standalone_mode=False)
    except click.Abort:  # ctrl-C, by which a monitor ends
        raise SystemExit(128 + signal.SIGINT) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except (WanshimError, OSError) as error:
        click.secho(f"wanshim: {error}", fg="red", err=True)
        raise SystemExit(2) from None
    raise SystemExit(status)


def count(text: str) -> int:
    """The number of an option of GPUs."""
    if text.strip().isdecimal() and int(text) >= 1:
        return int(text)
    raise click.BadParameter(
        f"{text!r}. Expected a number, 1 or more; which GPUs, as in CUDA_VISIBLE_DEVICES=2,3 wanshim run --gpus 2"
    )


def _listed(_: object, __: object, given: tuple[str, ...]) -> list[str]:
    return list(given)


class _Path(click.Path):
    """A path; an empty one, as of a variable of the shell that is not set, is not the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("''. Expected a path", param, ctx)
        return super().convert(value, param, ctx)


PATH: Any = _Path(path_type=Path)
command_line = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, callback=_listed)
as_json = click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
features = click.option("--features", "-f", metavar="NAMES", help="In place of WANSHIM_FEATURES.")
gpus = click.option(
    "--gpus",
    metavar="N",
    type=count,
    help="Train on so many GPUs by a plan: on several, a process for each and a sample on all.",
)
report = click.option(
    "--report/--no-report", default=True, help="Say on standard error what is on, what is planned, and what ran."
)
fast = click.option("--fast", is_flag=True, help="All that is faster and changes bits: WANSHIM_FAST=1.")


@click.group(
    cls=Commands,
    elsewhere={
        "matrix": "wanshim.cli.matrix:matrix",
        "monitor": "wanshim.cli.monitor:monitor",
        "demo": "wanshim.cli.demo:demo",
    },
    context_settings={"show_default": True},
    no_args_is_help=True,
)
@click.version_option(__version__, message="wanshim %(version)s", help="Print the version.")
def app() -> None:
    """Multi-GPU Wan abilities for the video framework and version you already run."""


@app.command(context_settings=FOREIGN_OPTIONS)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, callback=_listed)
@features
@click.option(
    "--all", "everything", is_flag=True, help="Frameworks that are not installed too, and how each verdict was tested."
)
@gpus
@as_json
def doctor(command: list[str], features: str | None, everything: bool, gpus: int | None, as_json: bool) -> None:
    """Report what each installed framework can get here and what to type for it; with a command, as for
    `wanshim run`, whether that would start. Imports neither a framework nor torch. Exit status 1 if something requested
    is unavailable."""
    from wanshim.cli import sentences
    from wanshim.doctor import diagnosis
    from wanshim.launch import start
    from wanshim.launch.gpu_processes import settings_of_ranks

    start.look_beside(command)
    read = settings_of_ranks(command, gpus, features)
    if command:
        start.resolve(command)
    result = diagnosis.examine(read, features, command)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _say(sentences.of_diagnosis(result, everything=everything))
    if not result.is_well:
        raise SystemExit(1)


@app.command("features")
@as_json
def list_features(as_json: bool) -> None:
    """List every feature, what it does and what switches it on."""
    from wanshim.cli import sentences
    from wanshim.select import catalog

    known = catalog.discover().features.values()
    if as_json:
        click.echo(json.dumps([sentences.feature_record(feature) for feature in known], indent=2))
    else:
        _say(sentences.of_features(known))


@app.command(context_settings=FOREIGN_OPTIONS)
@command_line
@features
@report
@gpus
@fast
def run(command: list[str], features: str | None, report: bool, gpus: int | None, fast: bool) -> None:
    """Run a program, and every Python process it starts, with wanshim active. The command is `-- prog args`."""
    from wanshim.doctor import diagnosis
    from wanshim.launch import start
    from wanshim.launch.gpu_processes import settings_of_ranks

    start.look_beside(command)
    read = settings_of_ranks(command, gpus, features, fast=fast)
    _print(diagnosis.prepare(features, read, f"--gpus {gpus}" if gpus is not None else ""))
    gpus = None if read.disable else gpus
    variables = start.environment(features, report=report, gpus=gpus, fast=fast)
    watched = report and not read.disable and (features or read.features) != "none"
    raise SystemExit(start.run(command, variables, processes=gpus or 1, watched=watched))


@app.command(context_settings=FOREIGN_OPTIONS)
@command_line
@click.option("--gpus", metavar="N", type=count, required=True, help="How many GPUs the pipeline uses.")
@features
@report
@fast
def generate(command: list[str], gpus: int, features: str | None, report: bool, fast: bool) -> None:
    """Run a program that generates on one GPU: faster there, or once, with its pipeline over several GPUs. The command
    is `-- prog args`."""
    from wanshim.doctor import diagnosis
    from wanshim.launch import start
    from wanshim.launch.gpu_processes import settings_of_generation

    start.look_beside(command)
    read = settings_of_generation(command, gpus, features, fast=fast)
    _print(diagnosis.prepare(features, read, f"--gpus {gpus}"))
    variables = start.environment(features, report=report, generate=None if read.disable else gpus, fast=fast)
    raise SystemExit(start.run(command, variables, watched=report and not read.disable))


@app.command()
@click.option("--size", required=True, help="Height, width and frames of the video, such as 704x1280x81.")
@click.option("--vae", default="2.1", help="2.1 or 2.2: Wan's VAE.")
@click.option("--mode", help="strict or fast operators. Default: both.")
@click.option("--dtype", default="bfloat16", help="bfloat16 or float16: what the VAE computes in.")
@click.option("--decode/--encode", default=None, help="One of the two. Default: both.", show_default=False)
def warm(size: str, vae: str, mode: str | None, dtype: str, decode: bool | None) -> None:
    """Compile the kernels and find the fastest of cuDNN's engines for a size ahead of time, with random weights."""
    from rich.console import Console

    from wanshim.cli import warm as warming

    warming.warm(size=size, vae=vae, mode=mode, dtype=dtype, decode=decode, console=Console())


def _say(lines: Iterable[tuple[str, str]]) -> None:
    """Whole lines: the terminal wraps them, and nothing is cut or lost in a pipe."""
    for text, colour in lines:
        click.secho(text, fg=None if colour == "bold" else colour or None, bold=colour == "bold" or None)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(f"wanshim: {line}", err=True)
