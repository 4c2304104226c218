"""`wanshim demo`: the real frameworks on a real clip with tiny random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wanshim.cli.main import PATH

OUTPUT = Path("demo-output")
video = click.option("--video", type=PATH, help="An mp4 of your own.")


@click.group(invoke_without_command=True)
@click.option("--frames", default=9, help="Frames of the clip, 4n + 1.")
@click.option("--plan", default="split", help="split, or sequence: each sample over two processes or more.")
@click.option(
    "--devices", default="", help="Stages of a split, such as cuda:0,cuda:1. Default: all GPUs, or the CPU twice."
)
@click.option("--steps", default=3, help="Optimizer steps of two micro-batches each.")
@click.option("--output", type=PATH, default=OUTPUT, help="Where checkpoint, LoRA files and logs go.")
@video
@click.pass_context
def demo(context: click.Context, /, **options: Any) -> None:
    """Train a LoRA with DiffSynth on a real clip, alone and over several GPUs, and compare."""
    if context.invoked_subcommand is None:
        from wanshim.demo import train

        train.run(**options)


@demo.command()
@click.option("--steps", type=click.IntRange(min=3), default=6, help="Optimizer steps of two micro-batches each.")
@click.option("--output", type=PATH, default=OUTPUT, help="Where checkpoint, LoRA files, states and logs go.")
@video
def resume(**options: Any) -> None:
    """A DiffSynth training is killed and goes on by the same command; compared with one that was not killed."""
    from wanshim.demo import resume

    resume.run(**options)


@demo.command()
@click.option("--gpus", default=4, help="The largest number of processes; without as many GPUs, on the CPU.")
@click.option("--steps", default=4, help="Denoising steps, each of two forwards.")
def generate(**options: Any) -> None:
    """A tiny Wan pipeline, denoised by one process, by two and by several: plans, speed, difference."""
    from wanshim.demo import generate

    generate.run(**options)


@demo.command()
@click.option("--frames", default=17, help="Frames of the clip, 4n + 1.")
@click.option("--ranks", default=2, help="Processes that decode together.")
@click.option("--mode", default="auto", help="auto, temporal, spatial or tile.")
@click.option("--fast/--no-fast", help="The fast operators instead of the strict ones.")
@click.option("--output", type=PATH, default=OUTPUT, help="Where decoded.mp4 goes.")
@video
def decode(**options: Any) -> None:
    """A real clip through a tiny Wan VAE, decoded by one process and by several: plan, speed, difference."""
    from wanshim.demo import decode

    decode.run(**options)
