"""Runs one function on several gloo ranks of this machine, with bounded waits, and brings back what each returns."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.forking import context_with
from wanshim.cli.demo.meeting import served_store

JOIN_SECONDS = 90.0
PRELOAD = ["diffusers.models.autoencoders.autoencoder_kl_wan", "wanshim.core.decoding"]


@dataclass(frozen=True)
class Outcome:
    """What a rank came to: its return value, or the type and text of its error; `exitcode` where it died."""

    value: Any = None
    error: str | None = None
    text: str = ""
    exitcode: int | None = 0


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    seconds: float = JOIN_SECONDS,
    backend: str = "gloo",
    preload: list[str] = PRELOAD,
) -> list[Outcome]:
    """Call `function(rank, size, *args)` in `size` fresh processes joined by `backend`; with NCCL, one a GPU."""
    # A server that has the imports behind it forks ranks in no time; CUDA does not survive a fork.
    context = context_with(preload) if backend == "gloo" else multiprocessing.get_context("spawn")
    with served_store() as variables:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_enter, args=(theirs, rank, size, variables, backend, function, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        outcomes = [_collect(pipe, process, seconds) for pipe, process in zip(pipes, processes)]
        for pipe, process in zip(pipes, processes):
            with contextlib.suppress(OSError):
                pipe.send("bye")
            process.join(5)
            if process.is_alive():
                process.kill()
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """The return values; fails with the first error's text."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}: {outcome.text}"
    return [outcome.value for outcome in outcomes]


def _collect(pipe: Any, process: Any, seconds: float) -> Outcome:
    try:
        if pipe.poll(seconds):
            return Outcome(**pipe.recv())
    except EOFError:
        process.join(5)
        return Outcome(error="Died", text="the process ended without an answer", exitcode=process.exitcode)
    process.kill()
    return Outcome(error="Hang", text=f"no answer within {seconds} s", exitcode=None)


def _enter(
    pipe: Any,
    rank: int,
    size: int,
    variables: dict[str, str],
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(variables, GLOO_SOCKET_IFNAME="lo")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=size)
    try:
        answer = {"value": function(rank, size, *args)}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": f"{error}\n{traceback.format_exc()}"}
    pipe.send(answer)
    pipe.poll(JOIN_SECONDS)  # a rank's connections end with it: nobody leaves before all have answered
    os._exit(0)  # a rank whose peer was killed must not wait for it in torch's teardown
