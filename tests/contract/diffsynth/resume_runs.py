"""Runs of `resume_job` or another job, each in processes of its own."""

from __future__ import annotations

import os
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.contract.diffsynth.prepared import Fork
from wanshim.launch.ranks import free_port

GRACE_S = 20.0  # from one process's end until the others are killed, as torchrun does


def start(
    folder: Path, processes: int = 1, variables: dict[str, str] | None = None,
    kill: tuple[float, list[int]] | None = None, module: str = "resume_job", **job: Any,
) -> list[int]:  # fmt: skip
    """The exit status of each process; -N: it ended by signal N.

    Args:
        module: whose `train` they run, with `job`.
        kill: after so many seconds, the processes of these ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    group["LOCAL_WORLD_SIZE"] = group["WORLD_SIZE"]
    ranks = []
    for rank in range(processes):
        ours = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        output = folder / f"said.{rank}.{job.get('attempt', 0)}"
        ranks.append(Fork(_train, output, {**(variables or {}), **ours}, folder, job, module))
    began, stopped_at = time.monotonic(), 0.0
    while running := [rank for rank in ranks if not rank.has_ended()]:
        if kill is not None and time.monotonic() - began > kill[0]:
            _send(signal.SIGKILL, [ranks[number] for number in kill[1]])
            kill = None
        if not stopped_at and any(rank.exitcode for rank in ranks):
            stopped_at = time.monotonic()
            _send(signal.SIGTERM, running)
        elif stopped_at and time.monotonic() - stopped_at > GRACE_S:
            _send(signal.SIGKILL, running)
        time.sleep(0.02)
    return [rank.exitcode or 0 for rank in ranks]


def said(folder: Path, attempt: int = 0) -> str:
    """What the processes of an attempt wrote."""
    return "\n".join(path.read_text() for path in sorted(folder.glob(f"said.*.{attempt}")))


def _send(number: int, ranks: list[Fork]) -> None:
    for rank in ranks:
        rank.send(number)


def _train(output: Path, variables: dict[str, str], folder: Path, job: dict[str, Any], module: str) -> None:
    """In a process of its own."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **variables})
    import wanshim
    from wanshim.patching import seam

    seam.on_note = lambda _, text: print(text, flush=True)  # also of one that never comes to its report
    wanshim.activate()
    import_module(f"{__package__}.{module}").train(folder, **job)
    print(wanshim.report())
