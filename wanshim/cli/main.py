"""The command line: doctor, features, matrix, run, demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from wanshim import __version__
from wanshim.cli import launch, tables
from wanshim.errors import WanshimError

app = typer.Typer(
    name="wanshim",
    help="Multi-GPU Wan abilities for the video framework and version you already run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
demo = typer.Typer(help="The real frameworks on a real clip with tiny random weights.", invoke_without_command=True)
app.add_typer(demo, name="demo")
matrix = typer.Typer(help="What is patched, native or refused in which version.", invoke_without_command=True)
app.add_typer(matrix, name="matrix")
console = Console()
errors = Console(stderr=True)

Features = Annotated[Optional[str], typer.Option("--features", "-f", help="WANSHIM_FEATURES for this call.")]  # noqa: UP045
AsJson = Annotated[bool, typer.Option("--json", help="The same as JSON.")]


def entry() -> None:
    """Run the command; an error of ours is one message and exit status 2, not a traceback."""
    try:
        app()
    except WanshimError as error:
        errors.print(f"wanshim: {error}", style="red", highlight=False, markup=False)
        raise SystemExit(2) from None


def _version(show: bool) -> None:
    if show:
        console.print(f"wanshim {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Multi-GPU Wan abilities for the video framework and version you already run."""


@app.command()
def doctor(features: Features = None, as_json: AsJson = False) -> None:
    """Say what wanshim would do here, and why. Imports no framework. Exit status 1 where something asked for
    cannot be had."""
    from wanshim import diagnosis

    result = diagnosis.examine(features)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        tables.print_diagnosis(result, console)
    if result.missing:
        raise typer.Exit(1)


@app.command("features")
def list_features(as_json: AsJson = False) -> None:
    """List every feature, what it does and what switches it on."""
    from wanshim import catalog

    known = catalog.discover().features.values()
    if as_json:
        typer.echo(json.dumps([{"feature": f.name, "summary": f.summary, "auto": f.auto} for f in known], indent=2))
    else:
        tables.print_features(known, console)


@matrix.callback()
def show_matrix(context: typer.Context, as_json: AsJson = False) -> None:
    """Print the matrix: framework, version, feature, verdict, how it was tested."""
    if context.invoked_subcommand is None:
        from wanshim import matrix as matrices

        loaded = matrices.load()
        if as_json:
            typer.echo(json.dumps(tables.matrix_records(loaded), indent=2))
        else:
            tables.print_matrix(loaded, console)


@matrix.command()
def fingerprint(framework: str, folder: Path) -> None:
    """Print the `features:` part of a row for the source of FRAMEWORK in FOLDER (the package's own folder)."""
    from wanshim import catalog
    from wanshim.patching.probe import SourceTree

    known = catalog.discover()
    if framework not in known.frameworks:
        raise WanshimError(f"no framework {framework!r}", expected="one of " + ", ".join(known.frameworks))
    if not (folder / "__init__.py").is_file():
        raise WanshimError(f"{folder} holds no __init__.py", expected="the folder of an unpacked package")
    source = SourceTree(framework, folder)
    for feature in known.features.values():
        if feature.framework == framework:
            typer.echo(f"{feature.ability}:\n  verdict: unknown\n  tested: nothing\n  seams:")
            for target in feature.targets:
                digest = source.fingerprint(target)
                typer.echo(f"    {target}: " + ("null" if digest is None else f'"{digest}"'))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="-- prog args")],
    features: Features = None,
    report: Annotated[bool, typer.Option(help="Say at the end, on standard error, what was patched.")] = True,
) -> None:
    """Run a program, and every Python process it starts, with wanshim active."""
    from wanshim import diagnosis

    diagnosis.check_selection(features)
    launch.run(command, features, report=report)


@demo.callback()
def train(
    context: typer.Context,
    frames: Annotated[int, typer.Option(help="Frames of the clip, 4n + 1.")] = 9,
    devices: Annotated[
        str, typer.Option(help="Stages, such as cuda:0,cuda:1. Default: all GPUs, or the CPU twice.")
    ] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps of two micro-batches each.")] = 3,
    output: Annotated[Path, typer.Option(help="Where checkpoint, LoRA files and logs go.")] = Path("demo-output"),
    video: Annotated[Optional[Path], typer.Option(help="An mp4 of your own.")] = None,  # noqa: UP045
) -> None:
    """Train a LoRA with DiffSynth on a real clip, unsplit and split, and compare."""
    if context.invoked_subcommand is None:
        from wanshim.cli.demo import train as training

        names = [name.strip() for name in devices.split(",") if name.strip()]
        if not training.run(frames=frames, devices=names, steps=steps, output=output, video=video, console=console):
            raise typer.Exit(1)
