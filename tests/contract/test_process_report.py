"""Reports of processes that nobody started by `wanshim run`, and of those that no exit handler runs in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata

import pytest

ACTIVATE = "import wanshim; wanshim.activate()"
# as vLLM's loader does it, in each of its processes
PLUGIN = """
from importlib.metadata import entry_points
for point in entry_points(group="vllm.general_plugins"):
    if point.name == "wanshim":
        point.load()()
"""
MEET = """
import os, signal, sys, time
import torch.distributed as dist
def meet():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def wait():
    print("ready", flush=True)
    for _ in range(2000):  # a signal right before a sleep is handled behind it
        time.sleep(0.1)
"""
REPORT = "wanshim: torch.pg_timeout exercised, "
VARIABLES = {"WANSHIM_REPORT": "1", "WANSHIM_PG_TIMEOUT_S": "100"}
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def start(*program: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **VARIABLES, **variables}
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(program)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """The status, and what it reported."""
    errors = process.communicate(timeout=250)[1]
    return process.returncode, [line for line in errors.splitlines() if line.startswith("wanshim: ")]


def signalled(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)


has_plugin = any(point.name == "wanshim" for point in metadata.entry_points(group="vllm.general_plugins"))


@pytest.mark.parametrize(
    "activated",
    [
        pytest.param(ACTIVATE, marks=pytest.mark.sweep),
        pytest.param(PLUGIN, marks=pytest.mark.skipif(not has_plugin, reason="wanshim is not installed")),
    ],
    ids=["activate()", "plugin"],
)
def test_process_reports_at_its_start_and_its_end(activated: str) -> None:
    status, lines = finish(start(activated, MEET, "meet()"))
    assert status == 0
    assert lines[0].startswith("wanshim: on in process ")
    assert lines[-1].startswith(f"{REPORT}1 call of init_process_group") or REPORT in lines[-1]
    assert sum(REPORT in line for line in lines) == 1


@pytest.mark.sweep
def test_process_that_nobody_asked_reports_nothing() -> None:
    assert finish(start(ACTIVATE, MEET, "meet()", WANSHIM_REPORT="")) == (0, [])


@pytest.mark.sweep
def test_sigterm_that_nobody_handles_ends_the_process_by_it_after_a_report() -> None:
    process = start(ACTIVATE, MEET, "meet(); wait()")
    signalled(process, signal.SIGTERM)
    status, lines = finish(process)
    assert status == -signal.SIGTERM
    assert REPORT in lines[-1]


def test_sigterm_that_comes_again_meanwhile_leaves_the_report_whole() -> None:
    """As a group of processes is ended: each gets it, and the launcher passes it on."""
    process = start(ACTIVATE, MEET, "meet(); wait()")
    signalled(process, signal.SIGTERM)
    for _ in range(50):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    status, lines = finish(process)
    assert status == -signal.SIGTERM
    assert REPORT in lines[-1]


POOL = """
import multiprocessing
os.setsid()
pool = multiprocessing.get_context("spawn").Pool(2)
pool.map(abs, range(2))
"""


def test_sigterm_of_a_group_leaves_no_worker_that_a_pool_starts_during_the_report() -> None:
    process = start(ACTIVATE, MEET, POOL, "meet(); wait()")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    try:
        _, errors = process.communicate(timeout=60)  # until no process has the streams
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGTERM
    assert REPORT in errors


def test_sigterm_that_the_program_handles_is_its_own() -> None:
    process = start(ACTIVATE, MEET, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); meet(); wait()")
    signalled(process, signal.SIGTERM)
    status, lines = finish(process)
    assert (status, sum(REPORT in line for line in lines)) == (7, 1)


IN_A_THREAD = """
import threading, wanshim
thread = threading.Thread(target=wanshim.activate)
thread.start(); thread.join()
"""


@pytest.mark.parametrize("activated", [ACTIVATE, IN_A_THREAD], ids=["main thread", "another thread"])
def test_sigusr2_prints_what_ran_so_far_and_the_process_goes_on(activated: str) -> None:
    """vLLM-Omni's engine loads the plugins in a thread of its own, and with one GPU its worker is that process."""
    process = start(activated, MEET, "meet(); wait()")
    signalled(process, signal.SIGUSR2)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, lines = finish(process)
    assert f"wanshim: in process {process.pid} so far:" in lines
    assert sum(REPORT in line for line in lines) == 2


@pytest.mark.sweep
def test_sigusr2_without_a_report_is_what_it_was() -> None:
    process = start(ACTIVATE, MEET, "meet(); wait()", WANSHIM_REPORT="0")
    signalled(process, signal.SIGUSR2)
    assert finish(process) == (-signal.SIGUSR2, [])


def test_process_that_leaves_by_os_exit_reports_first() -> None:
    status, lines = finish(start(ACTIVATE, MEET, "meet(); os._exit(3)"))
    assert (status, sum(REPORT in line for line in lines)) == (3, 1)


FORKED = """
import multiprocessing
for target in (meet, time.time):
    worker = multiprocessing.get_context("fork").Process(target=target)
    worker.start(); worker.join()
"""


@pytest.mark.sweep
def test_forked_worker_reports_what_it_called_itself_and_one_without_a_call_nothing() -> None:
    _, lines = finish(start(ACTIVATE, MEET, FORKED))
    assert sum(" ends:" in line for line in lines) == 1
    assert sum(REPORT in line for line in lines) == 1


RANKED = """
import multiprocessing
def work(rank):
    os.environ["LOCAL_RANK"] = rank
    meet()
for rank in "01":
    worker = multiprocessing.get_context("fork").Process(target=work, args=(rank,))
    worker.start(); worker.join()
"""


def test_worker_that_learns_its_local_rank_after_its_start_reports_if_that_is_0() -> None:
    """The workers of FastVideo's and vLLM-Omni's executors do, and all of them carry out one call."""
    _, lines = finish(start(ACTIVATE, MEET, RANKED))
    assert sum(" ends:" in line for line in lines) == 1
    assert sum(REPORT in line for line in lines) == 1
    assert sum(line.startswith("wanshim: torch.pg_timeout: ") for line in lines) == 1


TERMINATED = """
import multiprocessing
started = multiprocessing.get_context("fork").Event()
def work():
    meet(); started.set(); time.sleep(200)
worker = multiprocessing.get_context("fork").Process(target=work)
worker.start(); started.wait(); worker.terminate(); worker.join()
print(worker.exitcode, flush=True)
"""


def test_sigterm_ends_a_worker_at_once_as_it_did() -> None:
    """One that waits inside NCCL must not wait for Python's handler."""
    process = start(ACTIVATE, MEET, TERMINATED)
    output, errors = process.communicate(timeout=250)
    assert output == f"{-signal.SIGTERM}\n", errors
    assert " ends:" not in errors
