"""Whatever ends a process of a pipeline, at any moment: no call hangs, no process and no shared memory is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.unit.generation import toy
from tests.unit.workers.forked import forked  # noqa: F401, a fixture
from wanshim.core.generation import Request, SharedPipeline
from wanshim.core.workers import pool
from wanshim.errors import WorkersFailed

pytestmark = pytest.mark.timeout(600)
DEADLINE = 20.0
SILENCE = 3.0
MANY = [pytest.mark.slow, pytest.mark.sweep]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pool, "_SILENCE_SECONDS", SILENCE)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Counts:
    """What is there before, and what of it is left over after the block."""

    def __enter__(self) -> Counts:
        self.open = self._open()
        self.pids: set[int] = set()
        return self

    def __exit__(self, *_: object) -> None:
        assert wait_for_end(self.pids) == set(), "processes are left"
        shared = [each.name for each in Path("/dev/shm").iterdir()]  # torch names what it makes by its process
        assert [name for name in shared if any(str(pid) in name.split("_") for pid in self.pids)] == []

    def descriptors(self) -> int:
        """How many more are open than before."""
        return self._open() - self.open

    def _open(self) -> int:
        return len(list(Path("/proc/self/fd").iterdir()))


def wait_for_end(pids: set[int], seconds: float = 5.0) -> set[int]:
    """Those that still run after so long."""
    end = time.monotonic() + seconds
    while (left := {pid for pid in pids if runs(pid)}) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def call(shared: SharedPipeline, model: toy.Model, way: tuple[int, int]) -> torch.Tensor:
    shared.request = Request(gpus=4, at_most=way)
    return shared.run(partial(toy.bind, model), partial(toy.generate, model, tokens=11))


def until_it_ends(shared: SharedPipeline, model: toy.Model, way: tuple[int, int], timer: threading.Timer) -> None:
    timer.start()
    begun = time.monotonic()
    while time.monotonic() - begun < DEADLINE:
        call(shared, model, way)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moments"),
    [
        *(("SIGINT", 2), ("SIGSTOP", 1), pytest.param("SIGKILL", 1, marks=pytest.mark.sweep)),
        *(pytest.param(name, 20, marks=MANY) for name in ("SIGKILL", "SIGINT", "SIGSTOP")),
    ],
)
@pytest.mark.usefixtures("forked")
def test_a_signal_at_any_moment_leaves_nothing_and_the_next_call_is_whole(name: str, moments: int) -> None:
    """SIGINT goes to this process, the others to one worker after the other, of those that the call uses."""
    torch.manual_seed(0)
    model, number = toy.Model(), signal.Signals[name]
    expected = toy.generate(model, 11)
    shared = SharedPipeline(Request(gpus=4), deadline=DEADLINE)
    drawn, grown = random.Random(0), []
    with Counts() as counts:
        try:
            for moment in range(moments):
                way = (2, 2) if moment % 2 else (2, 1)
                found = call(shared, model, way)
                assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
                pids = shared.pids
                counts.pids |= set(pids)
                grown.append(counts.descriptors())
                used = pids[: way[0] * way[1] - 1]
                target = os.getpid() if name == "SIGINT" else used[moment % len(used)]
                timer = threading.Timer(drawn.uniform(0.0, 0.2), os.kill, (target, number))
                begun = time.monotonic()
                with pytest.raises(KeyboardInterrupt if name == "SIGINT" else WorkersFailed):
                    until_it_ends(shared, model, way, timer)
                assert time.monotonic() - begun < DEADLINE, "it hangs"
                assert "forward" not in vars(model)
                timer.join()
            assert torch.equal(call(shared, model, (2, 1)), expected)
            counts.pids |= set(shared.pids)
        finally:
            shared.close()
    # A store's file stays open on purpose, see `file_of_a_store`.
    assert grown[-1] - grown[0] <= 16 + 2 * moments, f"descriptors are left open: {grown}"


PROGRAM = """
    import sys
    from functools import partial
    import torch
    from tests.unit.generation import toy
    from wanshim.core.generation import Request, SharedPipeline

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, shared = toy.Model(), SharedPipeline(Request(gpus=3, at_most=(1, 3)))
    announced = False
    while True:
        shared.run(partial(toy.bind, model, False), partial(toy.generate, model, tokens=11, guided=False))
        if not announced:
            print("workers", *shared.pids, flush=True)
            announced = True
"""


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(20, marks=[*MANY, pytest.mark.timeout(1800)]),
    ],
)
def test_workers_end_with_a_program_that_is_killed(moments: int) -> None:
    drawn = random.Random(1)
    for _ in range(moments):
        with (
            Counts() as counts,
            subprocess.Popen([sys.executable, "-c", textwrap.dedent(PROGRAM)], stdout=subprocess.PIPE) as program,
        ):
            assert program.stdout is not None
            # Before it come lines of Gloo's own with torch 2.9.
            said = next(line for line in program.stdout if line.startswith(b"workers "))
            counts.pids = set(map(int, said.split()[1:]))
            assert len(counts.pids) == 2
            time.sleep(drawn.uniform(0.0, 0.2))
            program.kill()
