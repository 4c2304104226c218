"""Workers that wait before anybody knows what for: who takes them, and when they are not to be used."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.workers import functions
from tests.unit.workers.forked import forked  # noqa: F401, a fixture
from wanshim.core.workers import AHEAD, Workers, ahead, process

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    AHEAD.end()


def start(count: int) -> list[process.Worker]:
    AHEAD.start(count, ("tabnanny", "there.is.no.such.module"))
    assert len(AHEAD._workers) == count
    return list(AHEAD._workers)


def pids(waiting: list[process.Worker]) -> set[int]:
    return {worker.process.pid for worker in waiting}


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def results(workers: Workers, function, *args):
    return [workers.call(place, function, *args).result() for place in range(len(workers.devices))]


@pytest.mark.slow
def test_the_first_workers_take_them_and_what_is_over_ends() -> None:
    waiting = pids(start(3))
    first, second = Workers(CPU, [CPU, CPU], deadline=60), Workers(CPU, [CPU], deadline=60)
    first.begin()
    second.begin()
    assert set(first.pids) < waiting
    assert {pid for pid in waiting if alive(pid)} == set(first.pids)
    assert not waiting & set(second.pids)
    for workers, imported in ((first, [True, True]), (second, [False])):
        workers.hold(functions.Scale())
        assert results(workers, functions.is_imported, "tabnanny") == imported
        workers.close()
    assert not any(map(alive, waiting))


def test_where_there_are_fewer_the_others_start_and_share_their_file() -> None:
    (waiting,) = pids(start(1))
    workers = Workers(CPU, [CPU, CPU], deadline=60)
    workers.hold(functions.Scale())
    assert waiting in workers.pids
    assert results(workers, functions.inode, workers.file) == [os.fstat(workers.file).st_ino] * 2
    workers.close()


def test_one_that_was_killed_meanwhile_is_replaced() -> None:
    killed, kept = start(2)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait(60)
    workers = Workers(CPU, [CPU, CPU], deadline=60)
    workers.hold(functions.Scale())
    assert kept.process.pid in workers.pids
    assert killed.process.pid not in workers.pids
    workers.close()


@pytest.mark.parametrize("change", ["sys.path", "folder"])
def test_where_modules_would_be_found_elsewhere_new_ones_start(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waiting = pids(start(1))
    if change == "folder":
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    workers = Workers(CPU, [CPU], deadline=60)
    workers.begin()
    assert not waiting & set(workers.pids)
    assert not any(map(alive, waiting))
    workers.close()


def test_variables_that_changed_meanwhile_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_A_TEST_BEFORE", "1")
    waiting = pids(start(1))
    monkeypatch.delenv("OF_A_TEST_BEFORE")
    monkeypatch.setenv("OF_A_TEST_AFTER", "2")
    workers = Workers(CPU, [CPU], deadline=60)
    workers.hold(functions.Scale())
    assert set(workers.pids) == waiting
    assert results(workers, functions.variables, "OF_A_TEST_") == [{"OF_A_TEST_AFTER": "2"}]
    workers.close()


def test_a_forked_process_leaves_them_alone() -> None:
    waiting = pids(start(1))
    child = os.fork()
    if not child:
        AHEAD.end()
        os._exit(len(AHEAD.take(1)))
    assert os.waitpid(child, 0)[1] == 0
    workers = Workers(CPU, [CPU], deadline=60)
    workers.hold(functions.Scale())
    assert set(workers.pids) == waiting
    workers.close()


def test_where_no_process_can_be_started_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, other: int) -> process.Worker:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(ahead, "Worker", fail)
        AHEAD.start(1, ())
    workers = Workers(CPU, [CPU], deadline=60)
    workers.begin()
    assert len(workers.pids) == 1
    workers.close()
