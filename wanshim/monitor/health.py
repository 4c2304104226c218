"""What is wrong with a run: a stall, a rank behind the others, a loss that is no number, a process gone."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from wanshim.core.training.recorder import process_start
from wanshim.monitor.reading import text, whole
from wanshim.monitor.runs import DeviceLog, Run

FIRST_STEP_S = 1800.0  # loading, compiling and the first collective may take as long as a process group waits
PAUSE_S = 600.0  # a checkpoint or a validation


@dataclass(frozen=True)
class Patience:
    """When silence is a stall: `medians` times the median step, and never under `floor_s` seconds."""

    medians: float = 10.0
    floor_s: float = 60.0


USUAL = Patience()


@dataclass(frozen=True)
class Problem:
    """One thing wrong. `kind` is stalled, behind, nan, gone or failed."""

    kind: str
    message: str
    rank: int | None = None


def problems(run: Run, patience: Patience = USUAL, now: float | None = None) -> list[Problem]:
    """All of them, the worst first. A finished run has none but a loss that is no number."""
    now = time.time() if now is None else now
    found: list[Problem] = []
    for rank, logs in run.ranks.items():
        found += _of_process(rank, logs[0], patience, now)
    silent = {problem.rank for problem in found}
    found += [problem for problem in _behind(run) if problem.rank not in silent]
    found += [Problem("gone", f"rank {rank} has no log", rank) for rank in _missing(run, now)]
    order = ("failed", "gone", "stalled", "behind", "nan")
    return sorted(found, key=lambda problem: (order.index(problem.kind), problem.rank or 0))


def _of_process(rank: int, log: DeviceLog, patience: Patience, now: float) -> list[Problem]:
    found = []
    if log.nan_since is not None:
        value, since = log.last.get("loss"), log.nan_since
        found.append(Problem("nan", f"rank {rank}: the loss is {value} since step {since}", rank))
    if log.end:
        if log.end.get("state") != "finished":
            found.append(Problem("failed", f"rank {rank} failed: {text(log.end.get('error'))}", rank))
    elif not is_alive(log):
        found.append(Problem("gone", f"rank {rank} (process {log.start.get('pid')}) is gone", rank))
    elif (silence := now - log.last_seen) > allowed_silence(log, patience):
        found.append(Problem("stalled", f"rank {rank}: no step for {silence:.0f} s, after step {log.step}", rank))
    return found


def allowed_silence(log: DeviceLog, patience: Patience) -> float:
    """Seconds from the last line after which a process counts as stalled."""
    step = log.pace.step_seconds
    if log.step == 0 or step is None:
        return max(FIRST_STEP_S, patience.floor_s)
    allowed = max(patience.floor_s, patience.medians * step)
    return allowed + PAUSE_S if log.paused_since is not None else allowed


def is_alive(log: DeviceLog) -> bool:
    """Whether the process that logs is there. One of another host counts as there: its silence is a stall."""
    pid = whole(log.start.get("pid"), most=2**22)
    if not pid or log.start.get("host") != socket.gethostname():
        return True
    return process_start(pid) == log.start.get("process_started") is not None


def _behind(run: Run) -> list[Problem]:
    """Ranks step together, once an accumulation group; more than two groups apart is no jitter."""
    running = {rank: logs[0] for rank, logs in run.ranks.items() if not logs[0].end}
    if len(running) < 2:
        return []
    ahead = max(log.step for log in running.values())
    return [
        Problem("behind", f"rank {rank} is at step {log.step}, the first at {ahead}", rank)
        for rank, log in running.items()
        if ahead - log.step > 2 * run.group + 2
    ]


def _missing(run: Run, now: float) -> list[int]:
    """Ranks of a running run without a log, once the others have made steps."""
    first = run.first
    if first is None or first.end or first.step < 2 or not run.description:
        return []
    return [rank for rank in range(min(run.processes, 4096)) if rank not in run.ranks]
