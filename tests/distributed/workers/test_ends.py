"""However a program ends, its workers are gone soon after, and nothing is left in shared memory or in /tmp."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
SECONDS = 5.0
MOMENTS = [
    ("working", "SIGKILL"),  # three processes that import torch, as each of the others
    *(pytest.param("working", name, marks=pytest.mark.sweep) for name in ("SIGINT", "SIGTERM")),
    *(pytest.param(how, "SIGKILL", marks=pytest.mark.sweep) for how in ("idle", "forked", "starting")),
    ("ahead", "SIGKILL"),
    pytest.param("ahead", "SIGINT", marks=pytest.mark.sweep),
]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_by(pids: list[int]) -> list[Path]:
    """Files in memory or in /tmp that bear the number of one of these processes, as torch names its own."""
    paths = [path for folder in ("/dev/shm", "/tmp") for path in Path(folder).iterdir()]
    return [path for path in paths if any(f"_{pid}_" in path.name for pid in pids)]


def start(how: str) -> tuple[subprocess.Popen[str], list[int]]:
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.workers.program", how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # ctrl-C goes to the whole group, as a terminal sends it
    )
    assert program.stdout is not None
    return program, [int(pid) for pid in program.stdout.readline().split()]


def wait_until_gone(pids: list[int]) -> list[int]:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and any(map(runs, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if runs(pid)]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "name"), MOMENTS)
def test_a_signal_to_the_program_ends_its_workers(how: str, name: str) -> None:
    program, pids = start(how)
    assert len(pids) == 2
    assert all(map(runs, pids))
    number = signal.Signals[name]
    os.killpg(program.pid, number) if number is signal.SIGINT else program.send_signal(number)
    program.wait(60)
    orphans = wait_until_gone(pids)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    if how == "forked" and number is not signal.SIGINT:
        os.killpg(program.pid, signal.SIGKILL)  # the child of the program's own
    assert orphans == []
    assert left_by([program.pid, *pids]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status"),
    [
        pytest.param("exit", 3, marks=pytest.mark.sweep),
        ("ahead_exit", 3),
        ("raise", 1),
        pytest.param("_exit", 4, marks=pytest.mark.sweep),
    ],
)
def test_a_program_that_ends_by_itself_keeps_its_status_and_its_workers_end(how: str, status: int) -> None:
    program, pids = start(how)
    assert program.wait(60) == status
    assert wait_until_gone(pids) == []
