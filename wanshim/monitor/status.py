"""What the terminal, the page and the API say of a run: plain data, every value checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wanshim.monitor.health import Patience, Problem, problems
from wanshim.monitor.reading import finite, text, whole
from wanshim.monitor.runs import DeviceLog, Run, RunFolder


def of_folder(folder: RunFolder, patience: Patience) -> list[dict[str, Any]]:
    """The status of every run, the one that wrote last first."""
    found = [of_run(run, patience) for run in list(folder.runs.values())]
    return sorted(found, key=lambda status: (status["updated"], status["id"]), reverse=True)


def of_run(run: Run, patience: Patience) -> dict[str, Any]:
    """Seconds, bytes, percent; null where something is not known."""
    first = run.first
    found = problems(run, patience)
    total = run.total_steps
    step = first.step if first else 0
    logs = list(run.logs.values())
    return {
        "id": run.id,
        "name": run.name,
        "framework": text(run.description.get("framework")),
        "state": _state(run, found),
        "problems": [{"kind": p.kind, "message": p.message, "rank": p.rank} for p in found],
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
        "attempt": max((log.attempts for log in logs), default=0),
        "updated": max((log.last_seen for log in logs), default=0.0),
        "damaged_lines": sum(log.tail.damaged for log in logs),
        "unread_bytes": sum(log.tail.behind for log in logs),
        "gpus": [_gpu(log, found) for group in run.ranks.values() for log in group],
    }


def _state(run: Run, found: list[Problem]) -> str:
    for problem in found:
        if problem.kind != "nan":
            return problem.kind
    return _phase(run.first) if run.first else "starting"


def _phase(log: DeviceLog) -> str:
    """Of a process without a problem."""
    if log.end:
        return "finished"
    return "running" if log.last else "starting"


def _eta(first: DeviceLog | None, found: list[Problem]) -> float | None:
    """None where the run does not move: a promise then would be a lie."""
    if first is None or any(problem.kind in ("failed", "gone", "stalled") for problem in found):
        return None
    return 0.0 if first.end else first.pace.eta_seconds


def _elapsed(first: DeviceLog | None) -> float | None:
    begin = finite(first.start.get("t")) if first else None
    return max(0.0, first.last_seen - begin) if first and begin is not None else None


def _gpu(log: DeviceLog, found: list[Problem]) -> dict[str, Any]:
    return {
        "rank": log.rank,
        "device": log.device,
        "state": next((p.kind for p in found if p.rank == log.rank), _phase(log)),
        "current_step": log.step,
        "loss": finite(log.last.get("loss")),
        "memory_used": finite(log.last.get("memory")),
        "memory_total": finite(log.last.get("memory_total")),
        "utilization": finite(log.last.get("utilisation")),
        "absent": text(log.start.get("gpu_absent")) or None,
    }


def history(run: Run, most: int = 2000, after: float = -1.0) -> dict[str, Any]:
    """The curves: of the run by its first log, of memory and utilisation by each device's."""
    first = run.first
    curve = first.curve.thinned(most, after) if first else {}
    per_device = max(100, most // max(1, len(run.logs)))
    return {
        "id": run.id,
        "curve": curve,
        "gpus": [
            {"rank": log.rank, "device": log.device, **log.curve.thinned(per_device, after)}
            for group in run.ranks.values()
            for log in group
        ],
    }


def folder_of(path: Path) -> RunFolder:
    """The runs below `path`, read to the end once."""
    folder = RunFolder(path)
    folder.update_fully()
    return folder
