"""The command line: doctor, features, matrix, run, generate, warm, demo, monitor."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from typing import Annotated, Optional

import typer
from rich.console import Console

from wanshim import __version__
from wanshim.cli import matrix, monitor
from wanshim.demo import decode, resume, train
from wanshim.demo import generate as generate_demo
from wanshim.errors import WanshimError

app = typer.Typer(
    name="wanshim",
    help="Multi-GPU Wan abilities for the video framework and version you already run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
demo = typer.Typer(help="The real frameworks on a real clip with tiny random weights.", invoke_without_command=True)
demo.callback()(train.demo)
for name, command in (("resume", resume), ("generate", generate_demo), ("decode", decode)):
    demo.command(name)(command.run)
app.add_typer(demo, name="demo")
app.command("matrix")(matrix.matrix)
app.command("monitor")(monitor.monitor)
console = Console()
errors = Console(stderr=True)

FOREIGN_OPTIONS = {"allow_interspersed_args": False}  # what follows the first argument is another program's


def _count(text: str) -> int:
    if text.strip().isdecimal() and int(text) >= 1:
        return int(text)
    raise typer.BadParameter(
        f"{text!r}. Expected a number, 1 or more; which GPUs, as in CUDA_VISIBLE_DEVICES=2,3 wanshim run --gpus 2"
    )


Features = Annotated[Optional[str], typer.Option("--features", "-f", help="In place of WANSHIM_FEATURES.")]  # noqa: UP045
Gpus = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        parser=_count,
        help="Train on so many GPUs by a plan: on several, a process for each and a sample on all.",
    ),
]
Report = Annotated[bool, typer.Option(help="Say on standard error what is on, what is planned, and what ran.")]
Fast = Annotated[bool, typer.Option("--fast", help="All that is faster and changes bits: WANSHIM_FAST=1.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same as JSON.")]


def entry(commands: typer.Typer = app) -> None:
    """Run the command; an error of ours, or of a file, is one message and exit status 2, not a traceback."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        if isinstance(stream, TextIOWrapper):  # a name that the locale cannot write, such as an umlaut under LC_ALL=C
            stream.reconfigure(errors="backslashreplace")
    try:
        commands()
    except (WanshimError, OSError) as error:
        errors.print(f"wanshim: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from None


def _say(lines: Iterable[tuple[str, str]]) -> None:
    """Whole lines: the terminal wraps them, and nothing is cut or lost in a pipe."""
    for text, colour in lines:
        typer.secho(text, fg=None if colour == "bold" else colour or None, bold=colour == "bold" or None)


def _version(show: bool) -> None:
    if show:
        console.print(f"wanshim {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Multi-GPU Wan abilities for the video framework and version you already run."""


@app.command(context_settings=FOREIGN_OPTIONS)
def doctor(
    command: Annotated[Optional[list[str]], typer.Argument(help="-- prog args, as for `wanshim run`")] = None,  # noqa: UP045
    features: Features = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Frameworks that are not installed too, and how each verdict was tested.")
    ] = False,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Report what each installed framework can get here and what to type for it; with a command, whether that would
    start. Imports neither a framework nor torch. Exit status 1 if something requested is unavailable."""
    from wanshim.cli import sentences
    from wanshim.doctor import diagnosis
    from wanshim.launch.gpu_processes import settings_of_ranks

    read = settings_of_ranks(command or (), gpus, features)
    result = diagnosis.examine(read, features, command or ())
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _say(sentences.of_diagnosis(result, everything=everything))
    if not result.is_well:
        raise typer.Exit(1)


@app.command("features")
def list_features(as_json: AsJson = False) -> None:
    """List every feature, what it does and what switches it on."""
    from wanshim.cli import sentences
    from wanshim.select import catalog

    known = catalog.discover().features.values()
    if as_json:
        typer.echo(json.dumps([sentences.feature_record(feature) for feature in known], indent=2))
    else:
        _say(sentences.of_features(known))


@app.command(context_settings=FOREIGN_OPTIONS)
def run(
    command: Annotated[list[str], typer.Argument(help="-- prog args")],
    features: Features = None,
    report: Report = True,
    gpus: Gpus = None,
    fast: Fast = False,
) -> None:
    """Run a program, and every Python process it starts, with wanshim active."""
    from wanshim.doctor import diagnosis
    from wanshim.launch import start
    from wanshim.launch.gpu_processes import settings_of_ranks

    read = settings_of_ranks(command, gpus, features, fast=fast)
    _print(diagnosis.prepare(features, read, f"--gpus {gpus}" if gpus is not None else ""))
    gpus = None if read.disable else gpus
    variables = start.environment(features, report=report, gpus=gpus, fast=fast)
    watched = report and not read.disable and (features or read.features) != "none"
    raise typer.Exit(start.run(command, variables, processes=gpus or 1, watched=watched))


@app.command(context_settings=FOREIGN_OPTIONS)
def generate(
    command: Annotated[list[str], typer.Argument(help="-- prog args")],
    gpus: Annotated[int, typer.Option(parser=_count, help="How many GPUs the pipeline uses.")],
    features: Features = None,
    report: Report = True,
    fast: Fast = False,
) -> None:
    """Run a program that generates on one GPU: faster there, or once, with its pipeline over several GPUs."""
    from wanshim.doctor import diagnosis
    from wanshim.launch import start
    from wanshim.launch.gpu_processes import settings_of_generation

    read = settings_of_generation(command, gpus, features, fast=fast)
    _print(diagnosis.prepare(features, read, f"--gpus {gpus}"))
    variables = start.environment(features, report=report, generate=None if read.disable else gpus, fast=fast)
    raise typer.Exit(start.run(command, variables, watched=report and not read.disable))


@app.command()
def warm(
    size: Annotated[str, typer.Option(help="Height, width and frames of the video, such as 704x1280x81.")],
    vae: Annotated[str, typer.Option(help="2.1 or 2.2: Wan's VAE.")] = "2.1",
    mode: Annotated[Optional[str], typer.Option(help="strict or fast operators. Default: both.")] = None,  # noqa: UP045
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16: what the VAE computes in.")] = "bfloat16",
    decode: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--decode/--encode", help="One of the two. Default: both.", show_default=False),
    ] = None,
) -> None:
    """Compile the kernels and find the fastest of cuDNN's engines for a size ahead of time, with random weights."""
    from wanshim.cli import warm as warming

    warming.warm(size=size, vae=vae, mode=mode, dtype=dtype, decode=decode, console=console)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        errors.print(f"wanshim: {line}", highlight=False, markup=False, soft_wrap=True)
