"""Runs of `resume_job`, each in processes of its own that are forked from one that has imported DiffSynth: an import
takes longer than a run.

    python -m tests.contract.diffsynth.resume_runs        a run for each line of JSON on stdin, its statuses on stdout
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
GRACE_S = 20.0  # from one process's end until the others are killed, as torchrun does


class Runs:
    """The process that runs are forked from. As a context manager it ends with the block."""

    def __enter__(self) -> Runs:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**clean, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def start(
        self, folder: Path, processes: int = 1, variables: dict[str, str] | None = None,
        kill: tuple[float, list[int]] | None = None, **job: Any,
    ) -> list[int]:  # fmt: skip
        """The exit status of each process; -N: it ended by signal N.

        Args:
            kill: after so many seconds, the processes of these ranks.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = {"folder": str(folder), "processes": processes, "variables": variables or {}, "kill": kill, "job": job}
        print(json.dumps(line), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]


def said(folder: Path, attempt: int = 0) -> str:
    """What the processes of an attempt wrote."""
    return "\n".join(path.read_text() for path in sorted(folder.glob(f"said.*.{attempt}")))


def _run(
    folder: Path, processes: int, variables: dict[str, str], kill: tuple[float, list[int]] | None, job: dict[str, Any]
) -> list[int]:
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    group["LOCAL_WORLD_SIZE"] = group["WORLD_SIZE"]
    running, statuses, stopped_at = {}, dict[int, int](), 0.0
    for rank in range(processes):
        ours = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        running[_fork(folder / f"said.{rank}.{job.get('attempt', 0)}", {**variables, **ours}, folder, job)] = rank
    began = time.monotonic()
    while running:
        if kill is not None and time.monotonic() - began > kill[0]:
            _send(signal.SIGKILL, [pid for pid, rank in running.items() if rank in kill[1]])
            kill = None
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            statuses[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status and not stopped_at:
                stopped_at = time.monotonic()
                _send(signal.SIGTERM, running)
        elif stopped_at and time.monotonic() - stopped_at > GRACE_S:
            _send(signal.SIGKILL, running)
        time.sleep(0.02)
    return [statuses[rank] for rank in range(processes)]


def _send(number: int, pids: Any) -> None:
    for pid in pids:
        os.kill(pid, number)


def _fork(output: Path, variables: dict[str, str], folder: Path, job: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.environ.update(variables)
        _train(folder, job)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _train(folder: Path, job: dict[str, Any]) -> None:
    import wanshim
    from tests.contract.diffsynth.resume_job import train

    wanshim.activate()
    train(folder, **job)
    print(wanshim.report())


def _prepare() -> None:
    """What each run would do again: the model, and what a first step imports; its objects stay shared."""
    from tests.contract.diffsynth.resume_job import Job

    Job(Path(os.devnull), None, None, None).forward({"number": 0, "noise": []}).backward()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _prepare()
    for line in sys.stdin:
        print(json.dumps(_run(**{**(told := json.loads(line)), "folder": Path(told["folder"])})), flush=True)
