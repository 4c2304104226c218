"""A fork of the tests' fork server that has imported DiffSynth too, and trained a step: ranks of jobs are its forks.

An import takes longer than their work. What imports DiffSynth behind wanshim is a fork of `tests.forking` itself.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from tests.forking import forking
from tests.sources import read_once


class Fork:
    """A process that runs `target`; it is the server's child."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.pid: int = _ask((target, arguments))
        self.exitcode: int | None = None  # -N: it ended by signal N

    def has_ended(self) -> bool:
        if self.exitcode is None:
            self.exitcode = _ask(self.pid)
        return self.exitcode is not None

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < end:
            time.sleep(0.02)

    def is_alive(self) -> bool:
        return not self.has_ended()

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Nothing, if it has ended: its number may be another's."""
        if not self.has_ended():
            os.kill(self.pid, number)


_asks = Lock()  # two threads may start runs


def _ask(request: Any) -> Any:
    with _asks:
        server = _server()
        server.send(request)
        return server.recv()


@cache
def _server() -> Connection:
    ours, theirs = forking().Pipe()
    forking().Process(target=_serve, args=(theirs,)).start()  # no daemon, for its forks load data in processes
    theirs.close()
    atexit.register(ours.close)  # which ends it
    return ours


def _serve(tests: Connection) -> None:
    """Start a fork for each target, and say of each process number how it ended; None: it runs."""
    multiprocessing.set_start_method("fork", force=True)  # as in an interpreter of its own
    _prepare()
    while True:
        try:
            request = tests.recv()
        except EOFError:
            return
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            tests.send(os.waitstatus_to_exitcode(status) if ended else None)
        else:
            tests.send(os.fork() or _run(*request))
        del request  # the fork's ends of pipes: whoever reads them learns that it has ended


def _prepare() -> None:
    """What each rank would do again: the models, what a first step and an activation import, and the files that it
    parses; their objects stay shared."""
    import torch

    import wanshim
    from tests.contract.diffsynth.resume_job import LAYERS, Job
    from tests.contract.diffsynth.training import wan_pipe

    Job(Path(os.devnull), None, None, None).forward({"number": 0, "noise": []}).backward()
    for dtype, layers in ((torch.bfloat16, {}), (torch.float32, {}), (torch.bfloat16, {"layers": LAYERS})):
        wan_pipe(dtype=dtype, **layers)
    read_once(pytest.MonkeyPatch())
    wanshim.activate("all")
    wanshim.deactivate()
    gc.collect()
    gc.freeze()


def _run(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """In the fork; never returns."""
    status = 1
    try:
        target(*arguments)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
