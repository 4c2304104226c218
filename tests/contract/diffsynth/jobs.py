"""Starts `progress_job` as its users start a job: one process a rank, gloo on 127.0.0.1, wanshim by its variables."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wanshim.cli import launch

WAIT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    checkpoint: Path,
    output: Path,
    logs: Path,
    *options: str,
    processes: int = 1,
    features: str = "diffsynth.progress",
    variables: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """The processes of one job, rank 0 first."""
    base = launch.environment(features) | {"WANSHIM_PROGRESS_DIR": str(logs), "OMP_NUM_THREADS": "1"}
    base |= {"ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false", "WANSHIM_STRICT": "1"}
    base |= variables or {}
    if processes > 1:
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
        base |= {"LOCAL_WORLD_SIZE": str(processes)}
    command = [sys.executable, "-m", "tests.contract.diffsynth.progress_job"]
    command += ["--checkpoint", str(checkpoint), "--output", str(output), *options]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {} for rank in range(processes)]
    return [
        subprocess.Popen(command, env=base | rank, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in ranks
    ]


def finish(jobs: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Wait, and give what each rank says it did."""
    results = []
    try:
        for job in jobs:
            output, _ = job.communicate(timeout=WAIT_S)
            assert job.returncode == 0, output[-4000:]
            done = [line for line in output.splitlines() if line.startswith("DONE ")]
            results.append({**json.loads(done[-1][5:]), "output": output})
    finally:
        end(jobs)
    return results


def end(jobs: list[subprocess.Popen[str]]) -> None:
    for job in jobs:
        if job.poll() is None:
            job.kill()
        job.wait()
        if job.stdout is not None:
            job.stdout.close()
