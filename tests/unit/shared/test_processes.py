"""What the kernel says of another process: runs, is stopped, has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from wanshim.core.shared.processes import process, process_state

CHILD = "import wanshim.core.shared.processes as m; print(m.process(), flush=True); input()"


def until(name: str, state: str) -> None:
    while process_state(name) != state:
        time.sleep(0.005)  # the test's own timeout ends it


def test_state_of_another_process_is_the_kernels() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        assert process_state(name) == "runs"
        child.send_signal(signal.SIGSTOP)
        until(name, "stopped")
        child.send_signal(signal.SIGCONT)
        until(name, "runs")
    finally:
        child.kill()
    until(name, "ended")  # nobody has waited for it: it is a zombie
    child.communicate()
    assert process_state(name) == "ended"


def test_process_of_another_machine_or_an_earlier_one_of_that_number_is_not_this_one() -> None:
    namespace, number, start = process().rsplit("/", 2)
    assert process_state(process()) == "runs"
    assert process_state(f"{namespace}/{os.getpid()}/{int(start) - 1}") == "ended"
    assert process_state(f"another boot/pid:[1]/{number}/{start}") == "unknown"
    assert process_state("") == "unknown"
