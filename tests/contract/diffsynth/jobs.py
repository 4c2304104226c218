"""Runs `progress_job`: a process a rank, gloo on 127.0.0.1, wanshim by its variables, as under `wanshim run`."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.forking import forking
from wanshim.core.training.eta import StepEta
from wanshim.demo.meeting import served_store

WAIT_S = 240


def run(
    checkpoint: Path,
    output: Path,
    logs: Path,
    *options: str,
    processes: int = 1,
    features: str = "diffsynth.progress",
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """What each rank says it did, and its `output`; rank 0 first."""
    base = {"WANSHIM_FEATURES": f"none,{features}", "WANSHIM_PROGRESS_DIR": str(logs), "WANSHIM_STRICT": "1"}
    base |= {"ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false", **(variables or {})}
    if processes > 1:
        base |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    arguments = ["--checkpoint", str(checkpoint), "--output", str(output), *options]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {} for rank in range(processes)]
    with (
        served_store() if processes > 1 else contextlib.nullcontext({}) as store,
        ProcessPoolExecutor(processes, mp_context=forking()) as pool,
    ):
        base |= store
        started = [pool.submit(_rank, arguments, base | rank) for rank in ranks]
        return [rank.result(timeout=WAIT_S) for rank in started]


def _rank(arguments: list[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """One rank, in a fresh process of its own: the framework is imported behind wanshim."""
    import os

    os.environ.update(variables)
    import wanshim

    wanshim.activate()
    from tests.contract.diffsynth import progress_job

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        done = progress_job.main(arguments)
    return {**done, "output": printed.getvalue()}


def eta_at_half(run: Path) -> tuple[float, float]:
    """Of a run's folder: the ETA that rank 0 had after half of its steps, and the seconds it then took to the end."""
    description = json.loads((run / "run.json").read_text(encoding="utf-8"))
    accounting = description["accounting"]
    pace = StepEta(accounting["recorded_steps"], accounting["recorded_group"], description["checkpoints"])
    first, end = _halves(run)
    for record in first:
        pace.add(record["seconds"], record.get("checkpoint_seconds", 0.0))
    eta = pace.eta_seconds
    assert eta is not None
    return eta, end - first[-1]["t"]


def mean_eta_at_half(run: Path) -> float:
    """What a mean over all steps so far says: the second half takes what the first did."""
    first, _ = _halves(run)
    return sum(record["seconds"] + record.get("checkpoint_seconds", 0.0) for record in first)


def _halves(run: Path) -> tuple[list[dict[str, Any]], float]:
    """The first half of rank 0's steps, and the time of its end."""
    log = next(run.glob("rank-00000.*.jsonl"))
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "event" not in record]
    return steps[: len(steps) // 2], records[-1]["t"]
