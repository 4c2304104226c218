"""The status of a run for the terminal, the page and the API: plain data, every value checked."""

from __future__ import annotations

from typing import Any

from wanshim.monitor.health import Patience, Problem, named, problems
from wanshim.monitor.reading import LONGEST_S, MOST_STEPS, finite, instant, text, whole
from wanshim.monitor.runs import DeviceLog, RunFolder, RunLog

MOST_DEVICES = 256  # shown of a run
MOST_DEVICES_OF_ALL = 2048


def of_folder(folder: RunFolder, patience: Patience) -> list[dict[str, Any]]:
    """The status of every run, the one that wrote last first."""
    runs = sorted(folder.runs.values(), key=lambda run: (run.last_seen, run.id), reverse=True)
    found: list[dict[str, Any]] = []
    left = MOST_DEVICES_OF_ALL
    for run in runs:
        try:
            found.append(of_run(run, patience, min(left, MOST_DEVICES)))
        except Exception as error:  # a log that nobody foresaw must not hide the other runs
            empty = RunLog(run.id, run.folder)
            empty.fault = text(f"{type(error).__name__}: {error}")
            found.append(of_run(empty, patience))
        left -= len(found[-1]["gpus"])
    return found


def of_run(run: RunLog, patience: Patience, most_devices: int = MOST_DEVICES) -> dict[str, Any]:
    """Seconds, bytes, percent; null where something is not known."""
    first = run.first
    found = problems(run, patience)
    total = run.total_steps
    step = first.step if first else 0
    logs = [log for group in run.ranks.values() for log in group]
    kinds: dict[int | None, str] = {}
    for problem in found:
        kinds.setdefault(problem.rank, problem.kind)
    shown = sorted(logs, key=lambda log: log.rank not in kinds)[:most_devices]  # those in trouble first
    shown.sort(key=lambda log: log.rank)
    return {
        "id": run.id,
        "name": run.name,
        "framework": text(run.description.get("framework")),
        "state": _state(run, found),
        "problems": [{"kind": p.kind, "message": p.message, "rank": p.rank} for p in named(found)],
        "current_step": step,
        "total_steps": total,
        "optimizer_step": first.optimizer_step if first else 0,
        "total_optimizer_steps": whole(run.accounting.get("optimizer_steps")) or None,
        "epoch": (whole(first.last.get("epoch")) or 0) if first else 0,
        "epochs": whole(run.accounting.get("epochs")),
        "progress_percent": round(100 * min(1.0, step / total), 4) if total else None,
        "eta_seconds": _eta(first, found),
        "elapsed_seconds": _elapsed(first),
        "step_seconds": first.pace.step_seconds if first else None,
        "loss": finite(first.last.get("loss")) if first else None,
        "learning_rate": finite(first.last.get("lr")) if first else None,
        "processes": run.processes,
        "resumed_at": (whole(first.start.get("done"), most=MOST_STEPS) or None) if first else None,
        "resumes_at": (whole(first.end.get("resumes_at"), most=MOST_STEPS) or None) if first else None,
        "attempt": max((log.attempts for log in logs), default=0),
        "updated": run.last_seen,
        "damaged_lines": sum(log.tail.damaged for log in run.logs.values()),
        "unread_bytes": sum(log.tail.behind for log in run.logs.values()),
        "gpus": [_gpu(log, kinds.get(log.rank)) for log in shown],
        "gpus_left_out": len(logs) - len(shown),
    }


def _state(run: RunLog, found: list[Problem]) -> str:
    for problem in found:
        if problem.kind != "nan":
            return problem.kind
    return _phase(run.first) if run.first else "starting"


def _phase(log: DeviceLog) -> str:
    """The phase of a process without a problem."""
    if log.end:
        return "stopped" if log.end.get("state") == "stopped" else "finished"
    return "running" if log.last else "starting"


def _eta(first: DeviceLog | None, found: list[Problem]) -> float | None:
    """None where the run does not move: a promise then would be a lie."""
    if first is None or any(problem.kind in ("failed", "gone", "stalled") for problem in found):
        return None
    if first.end.get("state") == "stopped":
        return None
    return 0.0 if first.end else finite(first.pace.eta_seconds, most=LONGEST_S)


def _elapsed(first: DeviceLog | None) -> float | None:
    """From the first line of the attempt to its last, both by the clock of the host that wrote them."""
    begin, last = (instant(first.start.get("t")), first.last_t) if first else (None, None)
    return max(0.0, last - begin) if begin is not None and last is not None else None


def _gpu(log: DeviceLog, problem: str | None) -> dict[str, Any]:
    return {
        "rank": log.rank,
        "device": log.device,
        "state": problem or _phase(log),
        "current_step": log.step,
        "loss": finite(log.last.get("loss")),
        "memory_used": finite(log.last.get("memory")),
        "memory_total": finite(log.last.get("memory_total")),
        "utilization": finite(log.last.get("utilisation")),
        "absent": text(log.start.get("gpu_absent")) or None,
    }


def history(run: RunLog, most: int = 2000, after: float = -1.0) -> dict[str, Any]:
    """The curves: of the run by its first log, of memory and utilisation by the first devices' own."""
    first = run.first
    curve = first.curve.thinned(most, after) if first else {}
    shown = [log for group in run.ranks.values() for log in group][:MOST_DEVICES]
    per_device = max(20, most // max(1, len(shown)))
    return {
        "id": run.id,
        "curve": curve,
        "resumed_at": list(first.resumed_at) if first else [],
        "gpus": [
            {
                "rank": log.rank,
                "device": log.device,
                **log.curve.thinned(per_device, after, columns=("memory", "utilisation")),
            }
            for log in shown
        ],
    }
