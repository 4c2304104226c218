"""`wanshim run --gpus`: a rank that cannot be started leaves none of the others, nor what they have started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wanshim.launch import ranks, start

ROOT = Path(__file__).parents[2]
BOUND_S = 30.0  # for a machine under load
# Written at once, under its name only when it is whole.
PROGRAM = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with open("pids.part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(ready: Any) -> bool:
    end = time.monotonic() + BOUND_S
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(ready())


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path / "pids"
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        if is_running(pid):
            os.kill(pid, 9)


def test_ranks_and_their_children_are_gone_if_a_later_rank_cannot_be_started(
    pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pids.parent / "train.py").write_text(PROGRAM)
    begin, started = ranks._start, list[Any]()

    def second_fails(*args: Any, **kwargs: Any) -> Any:
        if started:
            assert until(pids.exists)
            raise OSError(12, "Cannot allocate memory")
        started.append(begin(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(ranks, "_start", second_fails)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        ranks.run([sys.executable, "train.py"], 2, start.environment("none", gpus=2))
    rank, child = map(int, pids.read_text().split())
    assert until(lambda: not is_running(rank))
    assert until(lambda: not is_running(child))
