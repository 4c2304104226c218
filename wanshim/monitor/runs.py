"""The runs of a folder, as their logs tell them."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

from wanshim.core.training.pace import Pace
from wanshim.errors import MonitorInvalid
from wanshim.monitor.curve import Curve
from wanshim.monitor.reading import Tail, finite, read_run_json, text, whole

LOG_NAME = re.compile(r"rank-(\d{5})\.([A-Za-z0-9-]{1,40})\.jsonl")
MOST_RUNS = 200
MOST_LOGS = 4096
NAN = float("nan")


class DeviceLog:
    """One file: a process's steps with the readings of one of its devices."""

    def __init__(self, path: Path, rank: int, device: str) -> None:
        self.rank, self.device = rank, device
        self.tail = Tail(path)
        self._forget()

    def _forget(self) -> None:
        self.curve = Curve(("loss", "seconds", "lr", "memory", "utilisation"))
        self.start: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.attempts = 0
        self.step = self.optimizer_step = self.offset = 0
        self.paused_since: float | None = None
        self.nan_since: int | None = None
        self.pace_of: tuple[int | None, int, int, int] = (None, 1, 0, 0)
        self.pace = Pace(None)
        self.saves: list[float] = []

    def update(self) -> None:
        for record in self.tail.read():
            if self.tail.restarted:
                self._forget()
                self.tail.restarted = False
            self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event == "start":
            self._begin(record)
        elif event == "end":
            self.end = record
        elif event in ("checkpoint", "validation"):
            self.paused_since = finite(record.get("t"))
        elif event in ("checkpoint saved", "validated"):
            self.paused_since = None
        elif event is None:
            self._step(record)

    def _begin(self, record: dict[str, Any]) -> None:
        self.attempts += 1
        self.start, self.end, self.last = record, {}, {}
        self.device = text(record.get("device"), 40) or self.device
        done = whole(record.get("done")) or 0
        self.offset = max(0, self.offset + self.step - done)
        self.step = self.optimizer_step = done
        self.paused_since, self.nan_since = None, None
        self.pace = Pace(*self.pace_of, done=done)

    def _step(self, record: dict[str, Any]) -> None:
        step, seconds = whole(record.get("step")), finite(record.get("seconds"))
        if step is None or seconds is None or seconds < 0 or step <= self.step:
            self.tail.damaged += 1
            return
        self.step = step
        self.optimizer_step = whole(record.get("optimizer_step")) or 0
        self.last = record
        self.paused_since = None
        pauses = (finite(record.get(name)) or 0.0 for name in ("checkpoint_seconds", "validation_seconds"))
        self.pace.add(seconds, *pauses)
        self.pace.done = step
        loss = finite(record.get("loss"))
        if record.get("loss") in ("nan", "inf", "-inf"):
            self.nan_since = self.nan_since or step
        elif loss is not None:
            self.nan_since = None
        self.curve.add(
            self.offset + step,
            loss=loss,
            seconds=seconds,
            lr=finite(record.get("lr")),
            memory=finite(record.get("memory")),
            utilisation=finite(record.get("utilisation")),
        )

    @property
    def last_seen(self) -> float:
        """The time of the last line that has one, 0.0 without any."""
        times = (finite(r.get("t")) for r in (self.start, self.last, self.end))
        return max((t for t in times if t is not None), default=0.0)

    def expect(self, steps: int | None, group: int, checkpoints: int, validations: int) -> None:
        """What run.json says of the run; the pace keeps what it has measured."""
        self.pace_of = (steps, group, checkpoints, validations)
        self.pace.steps = steps
        self.pace.checkpoints.planned, self.pace.validations.planned = checkpoints, validations


class Run:
    """One folder with a run.json."""

    def __init__(self, folder: Path) -> None:
        self.id = folder.name
        self.folder = folder
        self.description: dict[str, Any] = {}
        self.logs: dict[str, DeviceLog] = {}

    def update(self) -> None:
        self.description = read_run_json(self.folder) or self.description
        for path in sorted(self.folder.iterdir())[:MOST_LOGS]:
            match = LOG_NAME.fullmatch(path.name)
            if match and path.name not in self.logs and not path.is_symlink():
                self.logs[path.name] = DeviceLog(path, int(match[1]), match[2])
        for device_log in self.logs.values():
            if not device_log.attempts:
                device_log.pace = self._pace()
            device_log.expect(*self._expected())
            device_log.update()

    def _expected(self) -> tuple[int | None, int, int, int]:
        pauses = (whole(self.description.get(name)) or 0 for name in ("checkpoints", "validations"))
        return self.total_steps, self.group, *pauses  # type: ignore[return-value]

    @property
    def total_steps(self) -> int | None:
        """Lines a whole log has."""
        return whole(self.accounting.get("recorded_steps", self.accounting.get("micro_steps"))) or None

    @property
    def group(self) -> int:
        """Lines of the log to an optimizer step."""
        found = self.accounting.get("recorded_group", self.accounting.get("gradient_accumulation"))
        return whole(found, most=1_000_000) or 1

    def _pace(self) -> Pace:
        return Pace(*self._expected())

    @property
    def accounting(self) -> dict[str, Any]:
        found = self.description.get("accounting")
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str:
        return text(self.description.get("name")) or self.id

    @property
    def processes(self) -> int:
        """Of the attempt that runs, as run.json says; else as many as have a log."""
        return whole(self.accounting.get("processes"), most=99_999) or len({log.rank for log in self.logs.values()})

    @property
    def ranks(self) -> dict[int, list[DeviceLog]]:
        """The logs of each process of the current attempt, its first device first."""
        result: dict[int, list[DeviceLog]] = {}
        for device_log in self.logs.values():
            if device_log.rank < self.processes:
                result.setdefault(device_log.rank, []).append(device_log)
        for logs in result.values():
            logs.sort(key=lambda log: _place(log))
        return dict(sorted(result.items()))

    @property
    def first(self) -> DeviceLog | None:
        """The first log of the lowest rank: its steps and loss stand for the run."""
        return next((logs[0] for logs in self.ranks.values()), None)

    @property
    def reading(self) -> bool:
        """Parts of the log are not read yet."""
        return any(log.tail.behind for log in self.logs.values())


def _place(device_log: DeviceLog) -> int:
    """Where the device stands among those of its process."""
    devices = device_log.start.get("devices")
    return devices.index(device_log.device) if isinstance(devices, list) and device_log.device in devices else 0


class RunFolder:
    """All runs below a folder, kept up to date by `update`. A run is named by its folder's name alone.

    Raises:
        MonitorInvalid: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise MonitorInvalid(
                f"no folder {str(folder)!r}",
                expected="one that holds logs of runs",
                hint="Name the folder that WANSHIM_PROGRESS_DIR named, or training_logs in the output folder",
            )
        self.folder = folder.resolve()
        self.runs: dict[str, Run] = {}
        self.lock = threading.RLock()  # held while reading files: take it to look at curves

    def update(self) -> None:
        """Read what is new, at most a chunk of each file."""
        with self.lock:
            for folder in self._folders():
                self.runs.setdefault(folder.name, Run(folder))
            for run_id, run in list(self.runs.items()):
                try:
                    run.update()
                except OSError:
                    del self.runs[run_id]  # the folder is gone

    def update_fully(self, limit_s: float = 60.0) -> None:
        """Read to the end of all files, for callers that look once."""
        deadline = time.monotonic() + limit_s
        self.update()
        while any(run.reading for run in self.runs.values()) and time.monotonic() < deadline:
            self.update()

    def _folders(self) -> list[Path]:
        """DIR itself where it is a run, else the runs in it; never through a link."""
        if (self.folder / "run.json").is_file():
            return [self.folder]
        found = [p for p in self.folder.iterdir() if not p.is_symlink() and (p / "run.json").is_file()]
        return sorted(found, key=lambda p: p.name)[:MOST_RUNS]
