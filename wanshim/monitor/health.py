"""Problems of a run: a stall, a rank behind the others, a loss that is no number, a process gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice

from wanshim.core.shared.processes import namespace, process_start
from wanshim.errors import WanshimError
from wanshim.monitor.reading import LONGEST_S, text, whole
from wanshim.monitor.runs import DeviceLog, RunLog

FIRST_STEP_S = 1800.0  # loading, compiling and the first collective may take as long as a process group waits
PAUSE_S = 600.0  # a checkpoint or a validation
AHEAD_S = 3600.0  # a file from further in the future says nothing of its age
MOST_NAMED = 8  # ranks with the same problem
KINDS = ("failed", "gone", "stalled", "behind", "unread", "nan")


@dataclass(frozen=True)
class Patience:
    """When silence is a stall: `medians` times the median step, and never under `floor_s` seconds.

    Raises:
        WanshimError: one of them is negative or not finite, so that nothing or everything would be a stall.
    """

    medians: float = 10.0
    floor_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in (("stall-medians", self.medians), ("stall-floor", self.floor_s)):
            if not 0 <= value <= LONGEST_S:
                raise WanshimError(f"--{name} {value}", expected=f"a number from 0 to {LONGEST_S:.0e}")


USUAL = Patience()


@dataclass(frozen=True)
class Problem:
    """One thing wrong. `kind` is one of KINDS; `ranks` is how many have it."""

    kind: str
    message: str
    rank: int | None = None
    ranks: int = 1


def problems(run: RunLog, patience: Patience = USUAL, now: float | None = None) -> list[Problem]:
    """All of them, the worst first. A run that finished, or stopped with its state saved, has none but a loss that is
    no number."""
    now = time.time() if now is None else now
    found = list(_unread(run))
    for rank, logs in run.ranks.items():
        found += _of_process(rank, logs[0], patience, now)
    silent = {problem.rank for problem in found}
    found += [problem for problem in _behind(run) if problem.rank not in silent]
    found += _missing(run)
    return sorted(found, key=lambda problem: (KINDS.index(problem.kind), problem.rank is None, problem.rank or 0))


def named(found: list[Problem]) -> list[Problem]:
    """The same in few lines: the first ranks of each kind, and how many more there are."""
    few = []
    for kind, group in groupby(found, key=lambda problem: problem.kind):
        alike = list(group)
        few += alike[:MOST_NAMED]
        rest = alike[MOST_NAMED:]
        more = sum(problem.ranks for problem in rest)
        few += rest if len(rest) < 2 else [Problem(kind, f"{more} more ranks: {kind}", ranks=more)]
    return few


def _unread(run: RunLog) -> Iterator[Problem]:
    if run.fault:
        yield Problem("unread", f"the run cannot be read: {run.fault}")
    if run.logs_left_out:
        yield Problem("unread", "logs are left out: the folder holds too many files")
    if not run.ranks and not run.fault and (silence := run.age) > FIRST_STEP_S:
        yield Problem("gone", f"no process has logged for {silence:.0f} s")


def _of_process(rank: int, log: DeviceLog, patience: Patience, now: float) -> Iterator[Problem]:
    if log.nan_since is not None:
        message = f"rank {rank}: the loss has been {log.not_a_number} since step {log.nan_since}"
        yield Problem("nan", message, rank)
    silence = now - log.last_seen
    if log.end:
        if log.end.get("state") not in ("finished", "stopped"):
            yield Problem("failed", f"rank {rank} failed: {text(log.end.get('error'))}", rank)
    elif log.tail.fault:
        yield Problem("unread", f"rank {rank}: its log cannot be read: {log.tail.fault}", rank)
    elif not is_alive(log):
        yield Problem("gone", f"rank {rank} (process {whole(log.start.get('pid'))}) is gone", rank)
    elif silence > allowed_silence(log, patience):
        yield Problem("stalled", f"rank {rank}: no step for {silence:.0f} s, after step {log.step}", rank)
    elif silence < -AHEAD_S:
        message = f"rank {rank}: its log is dated {-silence:.0f} s in the future, so a stall would not show"
        yield Problem("unread", message, rank)


def allowed_silence(log: DeviceLog, patience: Patience) -> float:
    """Seconds from the last line after which a process counts as stalled."""
    step = log.pace.step_seconds
    if log.step == 0 or step is None:
        return max(FIRST_STEP_S, patience.floor_s)
    allowed = max(patience.floor_s, patience.medians * step)
    return allowed + PAUSE_S if log.paused_since is not None else allowed


def is_alive(log: DeviceLog) -> bool:
    """Whether the process that logs is there. One of another host or container counts as there: silent, it stalls."""
    pid = whole(log.start.get("pid"), most=2**22)
    # Both: a container may have its host's name, and where the boot is hidden, hosts may have one namespace.
    if not pid or not log.is_of_this_host or log.start.get("namespace") != namespace():
        return True
    return process_start(pid) == log.start.get("process_started") is not None


def _behind(run: RunLog) -> Iterator[Problem]:
    """Ranks step together, once an accumulation group; more than two groups apart is no jitter."""
    running = {rank: logs[0] for rank, logs in run.ranks.items() if not logs[0].end}
    ahead = max((log.step for log in running.values()), default=0)
    for rank, log in running.items():
        if ahead - log.step > 2 * run.group + 2:
            yield Problem("behind", f"rank {rank} is at step {log.step}, the first at {ahead}", rank)


def _missing(run: RunLog) -> Iterator[Problem]:
    """Ranks of a running run without a log, once the others have made steps."""
    first = run.first
    count = run.processes - len(run.ranks)
    if first is None or first.end or first.step < 2 or not run.description or count < 1:
        return
    named = list(islice((rank for rank in range(run.processes) if rank not in run.ranks), MOST_NAMED))
    yield from (Problem("gone", f"rank {rank} has no log", rank) for rank in named)
    if more := count - len(named):
        yield Problem("gone", f"{more} more ranks have no log", ranks=more)
