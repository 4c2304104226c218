"""The display of a run for a person: a bar on a terminal, plain lines where there is none."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from wanshim.core.training.accounting import GlobalSteps
from wanshim.core.training.eta import StepEta
from wanshim.core.training.recorder import Display, StepRecord, TrainingRun

LINE_EVERY_S = 60.0
DRAW_EVERY_S = 0.25
GIB = 2**30


def display_for(console: Console | None = None) -> Display:
    """The bar if standard error is a terminal, else the lines."""
    console = console or Console(stderr=True)
    return ProgressBar(console) if console.is_terminal else ProgressLines(console)


def duration(seconds: float | None) -> str:
    """1:02:03, or a dash."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def describe(record: StepRecord, pace: StepEta) -> str:
    """Steps, percent, ETA, loss, seconds a step, memory a GPU, in one line."""
    total = pace.steps
    of = f"/{total} ({100 * record.step / total:.1f} %)" if total else ""
    parts = [f"step {record.step}{of}", f"ETA {duration(pace.eta_seconds)}"]
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4g}")
    if pace.step_seconds is not None:
        parts.append(f"{pace.step_seconds:.3g} s/step")
    for device, gpu in record.gpus.items():
        parts.append(f"{device} {gpu.memory / GIB:.1f}/{gpu.memory_total / GIB:.0f} GiB")
    return ", ".join(parts)


class ProgressLines:
    """One line a minute, and one at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0
        self._last = ""

    def start(self, run: TrainingRun) -> None:
        self._say(f"{run.name}: {plan_of(run)}")

    def step(self, record: StepRecord, pace: StepEta) -> None:
        self._last = describe(record, pace)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY_S
            self._say(self._last)
            self._last = ""

    def stop(self, state: str) -> None:
        if self._last:
            self._say(self._last)
        self._say(state)

    def _say(self, line: str) -> None:
        self._console.print(f"wanshim: {line}", markup=False, highlight=False, soft_wrap=True)


class ProgressBar:
    """One bar for the whole run; what the framework prints meanwhile appears above it."""

    def __init__(self, console: Console) -> None:
        line = TextColumn("{task.fields[line]}", markup=False)
        self._progress = Progress(BarColumn(bar_width=None), line, console=console, auto_refresh=False, expand=True)
        self._task: Any = None
        self._next = 0.0
        self._last: tuple[StepRecord, StepEta] | None = None

    def start(self, run: TrainingRun) -> None:
        self._progress.start()
        total = run.accounting.recorded_steps if run.accounting else None
        self._task = self._progress.add_task(run.name, total=total, line=plan_of(run))
        self._progress.refresh()

    def step(self, record: StepRecord, pace: StepEta) -> None:
        self._last = (record, pace)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + DRAW_EVERY_S
            self._draw()

    def stop(self, state: str) -> None:
        self._draw()
        self._progress.stop()

    def _draw(self) -> None:
        if self._last is not None:
            record, pace = self._last
            self._progress.update(self._task, completed=record.step, line=describe(record, pace))
            self._progress.refresh()


def plan_of(run: TrainingRun) -> str:
    """The plan of the run in one line, before it begins."""
    steps = run.accounting
    if steps is None:
        return "a dataset without a length: no total, no ETA"
    if isinstance(steps, GlobalSteps):
        return (
            f"{steps.steps} optimizer steps of {steps.samples_per_step} sample(s) each, "
            f"{steps.processes} process(es) in {steps.data_parallel} data-parallel group(s)"
        )
    return (
        f"{steps.micro_steps} micro-steps of each of {steps.processes} process(es), "
        f"{steps.optimizer_steps} optimizer steps, {steps.epochs} epoch(s)"
    )
