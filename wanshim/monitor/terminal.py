"""The runs in a terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wanshim.core.training.progress_display import GIB, duration
from wanshim.monitor import status
from wanshim.monitor.health import Patience
from wanshim.monitor.runs import RunFolder

BAD = ("failed", "gone", "stalled", "behind", "unread")


def watch(folder: RunFolder, patience: Patience, console: Console, *, every_s: float = 1.0) -> None:
    """Show the runs until interrupted; once, where the output is no terminal."""
    if not console.is_terminal:
        folder.update_fully()
        console.print(render(status.of_folder(folder, patience), len(folder.left_out)))
        return
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            folder.update()
            live.update(render(status.of_folder(folder, patience), len(folder.left_out)), refresh=True)
            time.sleep(every_s)


def render(runs: list[dict[str, Any]], left_out: int = 0) -> Group:
    """Each run with its processes. Names come from logs: they are text, never markup."""
    parts: list[Any] = [] if runs else [Text("no run has logged here yet")]
    for run in runs:
        bar = ProgressBar(total=100, completed=run["progress_percent"] or 0, width=60)
        parts += [_headline(run), Padding(bar, 0)]  # a bar alone ends without a new line
        parts += [Text(problem["message"], style="red") for problem in run["problems"]]
        parts += [_devices(run)]
        if run["gpus_left_out"]:
            parts.append(Text(f"and {run['gpus_left_out']} more devices"))
        parts.append(Text(""))
    if left_out:
        parts.append(Text(f"{left_out} older runs are left out", style="red"))
    return Group(*parts)


def _headline(run: dict[str, Any]) -> Text:
    line = Text(run["name"], style="bold")
    line.append(f"  {run['state']}", style="red" if run["state"] in BAD else "green")
    total, percent = run["total_steps"], run["progress_percent"]
    line.append(f"  step {run['current_step']}" + (f"/{total} ({percent:.1f} %)" if total else ""), style="default")
    if run["resumed_at"] is not None:
        line.append(f"  resumed at step {run['resumed_at']}", style="default")
    if run["resumes_at"] is not None:
        line.append(f"  resumes at optimizer step {run['resumes_at']}", style="default")
    line.append(f"  ETA {duration(run['eta_seconds'])}", style="default")
    if run["step_seconds"] is not None:
        line.append(f"  {run['step_seconds']:.3g} s/step", style="default")
    if run["loss"] is not None:
        line.append(f"  loss {run['loss']:.4g}", style="default")
    return line


def _devices(run: dict[str, Any]) -> Table:
    table = Table("rank", "device", "state", "step", "memory", "use", box=SIMPLE_HEAD, pad_edge=False)
    for gpu in run["gpus"]:
        used, of, use = gpu["memory_used"], gpu["memory_total"], gpu["utilization"]
        memory = f"{used / GIB:.1f}/{(of or 0) / GIB:.0f} GiB" if used is not None else (gpu["absent"] or "-")
        percent = "-" if use is None else f"{use:.0f} %"
        cells = (str(gpu["rank"]), gpu["device"], gpu["state"], str(gpu["current_step"]), memory, percent)
        table.add_row(*(Text(cell) for cell in cells))
    return table
