"""Jobs that several processes run, forked or under `accelerate launch`, and the files that they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from tests.contract.diffsynth import ddp_worker
from tests.contract.diffsynth.ddp_worker import Job
from tests.contract.diffsynth.prepared import Fork
from wanshim.demo.meeting import served_store

LIMIT_S = 240


ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"]
ACCELERATE += ["--dynamo_backend", "no", "--main_process_port", "0", "--num_processes"]


# Two samples in one step: a sum of two has one order, and halves are exact, so every bit must be the same.
EXACT = Job("exact", samples=2, accumulation=1)


# DDP can neither flatten a quantised weight nor send it round
FLOAT8 = Job("float8", samples=2, accumulation=1, base="float8", variables={"WANSHIM_BASE": "float8"})


# Eight samples in one step; four a process run in a pipeline. In fp32 the order of the sum is in the last digits.
PIPELINED = Job("pipelined", samples=8, accumulation=4, dtype="float32")


SUM_ORDER = 1e-5  # of a gradient's norm


def in_one_process(job: Job) -> Job:
    """The same global batch without DDP and without a split."""
    return replace(job, accumulation=2 * job.accumulation, variables={})


def forked(folder: Path, jobs: list[Job], processes: int = 2, **variables: str) -> list[dict[str, Any]]:
    """What each rank says of each job, in processes that have imported DiffSynth."""
    folder.mkdir()
    shared = {"JOBS": ddp_worker.as_variable(jobs), "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": str(processes)}
    shared |= {"LOCAL_WORLD_SIZE": str(processes), **variables}
    with served_store() if processes > 1 else nullcontext({}) as meeting:
        ranks = []
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared, **meeting} if processes > 1 else shared
            ranks.append(Fork(ddp_worker.enter, folder, {**os.environ, **place}))
        for started in ranks:
            started.join(LIMIT_S)
        for started in ranks:
            started.send(signal.SIGKILL)  # one that waits for another that has failed
    said = "\n".join(path.read_text() for path in sorted(folder.glob("rank*.log")))
    assert [started.exitcode for started in ranks] == [0] * processes, said[-4000:]
    return answers(folder, processes)


def answers(folder: Path, processes: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def launch(folder: Path, jobs: list[Job], processes: int = 2, **variables: str) -> list[dict[str, Any]]:
    """What each rank of `accelerate launch` says of each job."""
    folder.mkdir()
    start = [*ACCELERATE, str(processes)] if processes > 1 else []
    shared = {"JOBS": ddp_worker.as_variable(jobs), "OMP_NUM_THREADS": "1", **variables}
    shared |= {} if "ON_GPU" in variables else {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *start, "-m", "tests.contract.diffsynth.ddp_worker", str(folder)],
        env={**os.environ, **shared},
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout  # whole: a test looks for a cause, and ranks speak in any order
    return answers(folder, processes)


def on_machines(folder: Path, jobs: list[Job], machines: int, processes: int) -> list[dict[str, Any]]:
    """The same by one agent of torchrun for each of so many machines, all of them this one under other names."""
    folder.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the port stays taken
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", folder.name]
    shared = {"JOBS": ddp_worker.as_variable(jobs), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    agents = []
    for number in range(machines):
        size = ["--nnodes", str(machines), "--nproc-per-node", str(processes), "--local-addr", "127.0.0.1"]
        job = ["-m", "tests.contract.diffsynth.ddp_worker", str(folder)]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *size, *meeting, *job],
                env={**os.environ, **shared, "MACHINE": f"machine{number}"},
                cwd=Path(__file__).parents[3],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for agent in agents:
        said, _ = agent.communicate(timeout=LIMIT_S)
        assert agent.returncode == 0, said[-4000:]
    return answers(folder, machines * processes)


def lora_of(folder: Path, job: Job) -> bytes:
    return (folder / job.name / "epoch-0.safetensors").read_bytes()


def check_same_step(job: Job, alone: Path, ranks: Path, *, exact: bool) -> None:
    """Both ranks step on the gradients of one process."""
    expected = load_file(alone / f"{job.name}.gradients0")
    for rank in (0, 1):
        found = load_file(ranks / f"{job.name}.gradients{rank}")
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            error = (gradient - expected[name]).float().norm() / expected[name].float().norm()
            assert error == 0 if exact else error < SUM_ORDER, (rank, name, error)
    if exact:
        assert lora_of(ranks, job) == lora_of(alone, job)


def check_ranks(said: list[dict[str, Any]], jobs: list[Job]) -> None:
    """Each rank has its own samples and split; accelerate is told for that time; rank 0 alone writes, once."""
    for job in jobs:
        ranks = [rank[job.name] for rank in said]
        assert sorted(number for rank in ranks for number in rank["seen"]) == list(range(job.samples))
        assert [rank["written"] for rank in ranks] == [["epoch-0.safetensors.partial"], []]
        for rank in ranks:
            assert any("split into 2 stages" in note for note in rank["notes"])
            assert any("ACCELERATE_BYPASS_DEVICE_MAP=true" in note for note in rank["notes"])
            assert (set(rank["bypass"]), rank["bypass_after"]) == ({"true"}, None)
    assert any("4 micro-batches in a pipeline of 2 stages" in note for note in said[0]["pipelined"]["notes"])
