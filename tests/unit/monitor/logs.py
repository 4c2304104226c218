"""Logs as the recorder writes them, made in a moment."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wanshim.core.shared.processes import namespace, process_start
from wanshim.core.training.accounting import StepAccounting
from wanshim.core.training.progress_log import file_name, write_run
from wanshim.monitor.runs import RunFolder


def folder_of(path: Path) -> RunFolder:
    """The runs below `path`, read to the end once."""
    folder = RunFolder(path)
    folder.update_fully()
    return folder


def make_run(folder: Path, processes: int = 1, samples: int = 100, **more: Any) -> Path:
    """A folder with its run.json."""
    accounting = StepAccounting(samples, processes=processes).to_dict()
    write_run(
        folder, {"name": folder.name, "framework": "test 1.0", "accounting": accounting, "checkpoints": 0, **more}
    )
    return folder


def start_line(rank: int = 0, device: str = "cuda:0", **more: Any) -> dict[str, Any]:
    """The start of this very process, so that it counts as alive."""
    here = {"pid": os.getpid(), "process_started": process_start(os.getpid()), "namespace": namespace()}
    here["host"] = socket.gethostname()
    return {"event": "start", "t": time.time(), "rank": rank, "device": device, "devices": [device], **here, **more}


def steps(count: int, *, seconds: float = 0.1, end: float | None = None, **more: Any) -> Iterable[dict[str, Any]]:
    """`count` steps, the last one at `end` (now)."""
    end = time.time() if end is None else end
    for step in range(1, count + 1):
        t = end - (count - step) * seconds
        yield {
            "step": step,
            "optimizer_step": step,
            "epoch": 0,
            "t": t,
            "loss": 1 / step,
            "lr": 1e-4,
            "seconds": seconds,
            **more,
        }


def write_log(folder: Path, records: Iterable[Mapping[str, Any]], rank: int = 0, device: str = "cuda:0") -> Path:
    path = folder / file_name(rank, device)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


END = {"event": "end", "state": "finished", "error": None}
