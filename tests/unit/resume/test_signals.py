"""Signals that ask a run to end, in the process that trains, in its threads, children and workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from wanshim.core.resume.signals import ASKING, AskedToEnd, ignore_in_worker
from wanshim.core.shared.processes import ignores
from wanshim.undo import Undo

PROGRAM = """
import multiprocessing, os, time
from wanshim.core.resume.signals import end_workers_at_exit, ignore_in_worker

def work(ready):
    ignore_in_worker()
    ready.set()
    time.sleep(600)

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    child = fork.Process(target=work, args=(ready,), daemon=True)
    child.start()
    ready.wait()
    end_workers_at_exit(os.getpid())
    print(child.pid, flush=True)
"""


@pytest.fixture
def undo() -> Iterator[Undo]:
    before = [signal.getsignal(number) for number in ASKING]
    with Undo() as undo:
        yield undo
    assert [signal.getsignal(number) for number in ASKING] == before


@pytest.mark.parametrize("number", ASKING)
def test_signal_is_noted_and_ends_nothing(undo: Undo, number: signal.Signals) -> None:
    asked = AskedToEnd(undo)
    assert asked.by == 0
    signal.raise_signal(number)
    assert asked.by == number


def test_second_interrupt_ends_at_once_and_another_signal_does_not(undo: Undo) -> None:
    asked = AskedToEnd(undo)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert asked.by == signal.SIGINT


def test_signal_that_the_program_ignores_stays_ignored(undo: Undo) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Undo() as inside:
            asked = AskedToEnd(inside)
            signal.raise_signal(signal.SIGUSR1)
            assert asked.by == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_run_in_another_thread_leaves_the_signals_alone(undo: Undo) -> None:
    before = [signal.getsignal(number) for number in ASKING]
    thread = threading.Thread(target=AskedToEnd, args=(undo,))
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in ASKING] == before


def test_child_ends_by_the_signal(undo: Undo) -> None:
    AskedToEnd(undo)
    child = multiprocessing.get_context("fork").Process(target=signal.raise_signal, args=(signal.SIGTERM,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGTERM


def test_worker_ignores_what_asks_and_the_process_it_loads_for_ends_it() -> None:
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert run.returncode == 0, run.stderr
    assert time.monotonic() - started < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int(run.stdout), 0)


def test_worker_s_signals(undo: Undo) -> None:
    def work() -> None:
        ignore_in_worker()
        os._exit(0 if all(ignores(os.getpid(), number) for number in ASKING) else 1)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    assert child.exitcode == 0
