"""The log of a run for other dashboards: TensorBoard event files and CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from wanshim.core.shared.files import written_whole
from wanshim.errors import LogUnreadable, WanshimError
from wanshim.monitor.reading import MOST_STEPS, Tail, finite, instant, whole
from wanshim.monitor.runs import DeviceLog, RunLog

SCALARS = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "seconds": "time/step_seconds",
    "checkpoint_seconds": "time/checkpoint_seconds",
    "validation_seconds": "time/validation_seconds",
    "memory": "gpu/memory_bytes",
    "utilisation": "gpu/utilisation_percent",
}
FIELDS = ("attempt", "step", "optimizer_step", "epoch", "t", *SCALARS, "memory_total")


def rows(log: DeviceLog) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Every step of a log, read anew from its file as large as it is now: attempt, step over all attempts, record.

    Raises:
        LogUnreadable: the log is gone, cannot be read, or was replaced while it was read.
    """
    tail = Tail(log.tail.path)
    attempt = offset = last = end = 0
    while True:
        for record in tail.read():
            if tail.restarted:
                break
            step = whole(record.get("step"), most=MOST_STEPS)
            if record.get("event") == "start":
                done = whole(record.get("done"), most=MOST_STEPS) or 0
                attempt, offset, last = attempt + 1, offset if done else min(MOST_STEPS, offset + last), done
            elif "event" not in record and step is not None and step > last:
                last = step
                yield attempt, offset + step, record
        if tail.fault or tail.restarted:
            raise LogUnreadable(
                f"{tail.path} cannot be read on: {tail.fault or 'it was replaced'}",
                expected="a log that stays while it is exported",
                hint="Export it again",
            )
        end = end or tail.size
        if not tail.behind or tail.size - tail.behind >= end:
            return


def to_csv(run: RunLog, output: Path) -> list[Path]:
    """One file a log, `rank-00000.cuda-0.csv`. Nothing is left half written."""
    output.mkdir(parents=True, exist_ok=True)
    return [_write_csv(log, output / f"{Path(name).stem}.csv") for name, log in sorted(run.logs.items())]


def _write_csv(log: DeviceLog, path: Path) -> Path:
    with written_whole(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for attempt, step, record in rows(log):
            values = (step if name == "step" else _cell(record.get(name)) for name in FIELDS[1:])
            writer.writerow([attempt, *values])
    return path


def _cell(value: object) -> object:
    """Numbers and the three that are none; no other text of a log reaches a spreadsheet."""
    return value if finite(value) is not None or value in ("nan", "inf", "-inf") else ""


def to_tensorboard(run: RunLog, output: Path) -> list[Path]:
    """One folder a log, `rank-00000.cuda-0/`, with an event file that TensorBoard shows as a run of its own.

    Raises:
        WanshimError: the tensorboard package is missing, or a folder holds event files already.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise WanshimError("tensorboard is not installed", hint="pip install 'wanshim[monitor]'") from None
    folders = [output / Path(name).stem for name in sorted(run.logs)]
    for folder in folders:
        if folder.is_dir() and any(folder.glob("events.out.tfevents.*")):
            raise WanshimError(f"{folder} holds event files already", hint="Name another folder, or remove it")

    def event(step: int, record: dict[str, Any]) -> Any:
        found = {tag: _scalar(record.get(name)) for name, tag in SCALARS.items()}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in found.items() if value is not None]
        return Event(wall_time=instant(record.get("t")) or 0.0, step=step, summary=Summary(value=values))

    for (_, log), folder in zip(sorted(run.logs.items()), folders, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        writer = EventFileWriter(str(folder))
        last = 0
        for _, step, record in rows(log):
            if step <= last:  # TensorBoard drops the points from there on, which are trained again
                writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
            last = step
            writer.add_event(event(step, record))
        writer.close()
    return folders


def _scalar(value: object) -> float | None:
    return float(str(value)) if value in ("nan", "inf", "-inf") else finite(value)


EXPORTS: dict[str, Callable[[RunLog, Path], list[Path]]] = {"csv": to_csv, "tensorboard": to_tensorboard}
