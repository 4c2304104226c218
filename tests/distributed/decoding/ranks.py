"""Runs one function on several gloo ranks of this machine, with bounded waits, and brings back what each returns."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.forking import forking

Key = TypeVar("Key")
Made = TypeVar("Made")
Start = Callable[..., Any]
JOIN_SECONDS = 90.0


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
    start: Start | None = None,
) -> list[Outcome]:
    """Call `function(rank, size, *args)` in `size` fresh processes joined by `backend`; with NCCL, one a GPU.

    Args:
        start: makes and starts a process of a function and its arguments; default: one that has imported no framework.
    """
    # CUDA does not survive a fork.
    context = forking() if backend == "gloo" else multiprocessing.get_context("spawn")

    def start_plain(target: Callable[..., None], *given: Any) -> Any:
        process = context.Process(target=target, args=given, daemon=True)
        process.start()
        return process

    start = start or start_plain
    pipes, processes = [], []
    with socket.socket() as listening:  # rank 0 hosts the store, on a port that is open before anybody looks for it
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        for rank in range(size):
            ours, theirs = context.Pipe()
            hosted = None if rank else listening
            processes.append(start(_enter, theirs, rank, size, port, hosted, backend, function, args))
            theirs.close()
            pipes.append(ours)
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


def made_together(keys: Iterable[Key], make: Callable[[Key], Made]) -> dict[Key, Made]:
    """`make` of each key on every rank, where each rank has made its share of them."""
    rank, size, every = dist.get_rank(), dist.get_world_size(), list(dict.fromkeys(keys))
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, {key: make(key) for key in every[rank::size]})
    return {key: made for part in parts for key, made in part.items()}


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
    port: int,
    listening: socket.socket | None,
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    descriptor = {} if listening is None else {"master_listen_fd": listening.detach()}
    store = dist.TCPStore("127.0.0.1", port, size, is_master=listening is not None, **descriptor)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        answer = {"value": function(rank, size, *args)}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": f"{error}\n{traceback.format_exc()}"}
    pipe.send(answer)
    pipe.poll(JOIN_SECONDS)  # rank 0 hosts the store: nobody leaves before all have answered
    os._exit(0)  # a rank whose peer was killed must not wait for it in torch's teardown
