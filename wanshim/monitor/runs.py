"""The runs of a folder, as their logs describe them."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from wanshim.core.training.eta import StepEta
from wanshim.errors import LogUnreadable
from wanshim.monitor.curve import Curve
from wanshim.monitor.reading import LONGEST_S, MOST_STEPS, Tail, finite, instant, read_run_json, text, whole

LOG_NAME = re.compile(r"rank-([0-9]{5})\.([A-Za-z0-9-]{1,40})\.jsonl")
MOST_RUNS = 200
MOST_LOGS = 8192  # of a run
MOST_FILES = 4 * MOST_LOGS  # looked at in a run's folder
MOST_MARKS = 200  # of the places where a run went on, on its curves
MOST_GROUP = 4096  # micro-batches to an optimizer step
CLOCK_S = 1.0  # a file system may keep whole seconds


class DeviceLog:
    """One file: a process's steps with the readings of one of its devices."""

    def __init__(self, path: Path, rank: int, device: str) -> None:
        self.rank, self.device = rank, device
        self.tail = Tail(path)
        self._forget()

    def _forget(self) -> None:
        self.curve = Curve(("loss", "seconds", "lr", "memory", "utilisation"))
        self.resumed_at: deque[int] = deque(maxlen=MOST_MARKS)  # x of its curve
        self.start: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.place = 0  # among the devices of its process
        self.is_of_this_host = False
        self.last_t: float | None = None  # of the last line that has a time, by the clock of the host that wrote it
        self.attempts = 0
        self.step = self.optimizer_step = self.offset = 0
        self.paused_since: float | None = None
        self.nan_since: int | None = None
        self.not_a_number = ""  # "nan", "inf" or "-inf"
        self.pace_of: tuple[int | None, int, int, int] = (None, 1, 0, 0)
        self.pace = StepEta(None)

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
            self._note_time(record)
        elif event in ("checkpoint", "validation"):
            self.paused_since = instant(record.get("t"))
        elif event in ("checkpoint saved", "validated"):
            self.paused_since = None
        elif event is None:
            self._step(record)

    def _begin(self, record: dict[str, Any]) -> None:
        self.attempts += 1
        self.is_of_this_host = record.get("host") == socket.gethostname()
        self.last_t = instant(record.get("t"))
        self.start, self.end, self.last = record, {}, {}
        self.device = text(record.get("device"), 40) or self.device
        devices = record.get("devices")
        named = record.get("device")
        self.place = devices.index(named) if isinstance(devices, list) and named in devices else 0
        done = whole(record.get("done"), most=MOST_STEPS) or 0
        if done:  # what is trained again replaces what was
            self.curve.cut(self.offset + done)
            self.resumed_at.append(self.offset + done)
        else:
            self.offset = min(MOST_STEPS, self.offset + self.step)
        self.step = done
        self.optimizer_step = whole(record.get("optimizer_step"), most=MOST_STEPS) or 0
        self.paused_since, self.nan_since = None, None
        self.pace = StepEta(*self.pace_of, done=done)

    def _note_time(self, record: dict[str, Any]) -> None:
        t = instant(record.get("t"))
        if t is not None:
            self.last_t = t if self.last_t is None else max(t, self.last_t)

    def _step(self, record: dict[str, Any]) -> None:
        step, seconds = whole(record.get("step"), most=MOST_STEPS), finite(record.get("seconds"), most=LONGEST_S)
        if step is None or seconds is None or seconds < 0 or step <= self.step:
            self.tail.damaged += 1
            return
        self.step = step
        self.optimizer_step = whole(record.get("optimizer_step")) or 0
        self.last = record
        self._note_time(record)
        self.paused_since = None
        pauses = (record.get(name) for name in ("checkpoint_seconds", "validation_seconds"))
        self.pace.add(seconds, *(finite(pause, most=LONGEST_S) or 0.0 for pause in pauses))
        self.pace.done = step
        loss = finite(record.get("loss"))
        if record.get("loss") in ("nan", "inf", "-inf"):
            self.nan_since, self.not_a_number = self.nan_since or step, record["loss"]
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
    def process(self) -> tuple[object, ...]:
        """The process that wrote the newest attempt."""
        return tuple(self.start.get(name) for name in ("host", "namespace", "pid", "process_started"))

    @property
    def has_begun(self) -> bool:
        """A line was written, or nobody can say because the file cannot be read."""
        return bool(self.start or self.last or self.end or self.tail.damaged or self.tail.fault)

    @property
    def last_seen(self) -> float:
        """When the process wrote last, 0.0 if never. Another host's clock does not count, nor a line that is
        younger than its file: there it is the time of the file."""
        t = self.last_t
        if t is not None and self.is_of_this_host and t <= self.tail.modified + CLOCK_S:
            return t
        return self.tail.modified

    def expect(self, steps: int | None, group: int, checkpoints: int, validations: int) -> None:
        """Take over what run.json says of the run; the pace keeps what it has measured."""
        self.pace_of = (steps, group, checkpoints, validations)
        self.pace.steps = steps
        self.pace.checkpoints.planned, self.pace.validations.planned = checkpoints, validations


class RunLog:
    """One folder with a run.json, a log, or both."""

    def __init__(self, id_: str, folder: Path) -> None:
        self.id = id_
        self.folder = folder
        self.description: dict[str, Any] = {}
        self.logs: dict[str, DeviceLog] = {}
        self.logs_left_out = False
        self.fault = ""  # why it could not be read
        self.processes = 0  # of the attempt that runs, as run.json says; else as many as have a log
        self.ranks: dict[int, list[DeviceLog]] = {}  # the logs of each of them, its first device first

    def update(self) -> None:
        """Read what is new.

        Raises:
            FileNotFoundError: the folder is gone.
        """
        try:
            self._update()
            self.fault = ""
        except FileNotFoundError:
            raise
        except Exception as error:  # whatever lies in this folder, the other runs are shown
            self.fault = text(f"{type(error).__name__}: {error}")

    def _update(self) -> None:
        self.description = read_run_json(self.folder) or self.description
        self._find_logs()
        for device_log in self.logs.values():
            if not device_log.attempts:
                device_log.pace = StepEta(*self._expected())
            device_log.expect(*self._expected())
            device_log.update()
        begun = [log for log in self.logs.values() if log.has_begun]
        counts = (self.description.get("processes"), self.accounting.get("processes"))
        said = next(filter(None, (whole(count, most=99_999) for count in counts)), None)
        self.processes = said or len({log.rank for log in begun})
        self.ranks = {}
        for device_log in sorted(begun, key=lambda log: (log.rank, log.place)):
            if device_log.rank < self.processes or not said:
                self.ranks.setdefault(device_log.rank, []).append(device_log)
        self.ranks = {rank: _of_one_process(logs) for rank, logs in self.ranks.items()}

    def _find_logs(self) -> None:
        entries = list(_entries(self.folder))
        matches = sorted(filter(None, (LOG_NAME.fullmatch(entry.name) for entry in entries)), key=lambda m: m[0])
        self.logs_left_out = len(matches) > MOST_LOGS or len(entries) == MOST_FILES
        for match in matches[:MOST_LOGS]:
            if match[0] not in self.logs:
                self.logs[match[0]] = DeviceLog(self.folder / match[0], int(match[1]), match[2])

    def _expected(self) -> tuple[int | None, int, int, int]:
        pauses = (whole(self.description.get(name), most=MOST_STEPS) or 0 for name in ("checkpoints", "validations"))
        return self.total_steps, self.group, *pauses  # type: ignore[return-value]

    @property
    def total_steps(self) -> int | None:
        """Lines a whole log has."""
        found = self.accounting.get("recorded_steps", self.accounting.get("micro_steps"))
        return whole(found, most=MOST_STEPS) or None

    @property
    def group(self) -> int:
        """Lines of the log to an optimizer step."""
        found = self.accounting.get("recorded_group", self.accounting.get("gradient_accumulation"))
        return whole(found, most=MOST_GROUP) or 1

    @property
    def accounting(self) -> dict[str, Any]:
        found = self.description.get("accounting")
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str:
        return text(self.description.get("name")) or self.id

    @property
    def first(self) -> DeviceLog | None:
        """The first log of the lowest rank: its steps and loss stand for the run."""
        return next((logs[0] for logs in self.ranks.values()), None)

    @property
    def age(self) -> float:
        """Seconds since a file of it was written."""
        return time.time() - _last_written(self.folder)

    @property
    def last_seen(self) -> float:
        return max((log.last_seen for logs in self.ranks.values() for log in logs), default=0.0)

    @property
    def reading(self) -> bool:
        """Parts of the log are not read yet."""
        return any(log.tail.behind for log in self.logs.values())


def _of_one_process(logs: list[DeviceLog]) -> list[DeviceLog]:
    """The logs of the process of a rank that wrote last: an earlier attempt may have used another device."""
    newest = max(logs, key=lambda log: log.tail.modified).process
    return [log for log in logs if log.process == newest]


class RunFolder:
    """The runs below a folder, the newest MOST_RUNS of them, kept up to date by `update`.

    Args:
        folder: of all runs, or of one.
        only: read the run of this name and no other.
        may_come: the folder may be made later; until then it has no runs.

    Raises:
        LogUnreadable: there is no such folder, or it cannot be read.
    """

    def __init__(self, folder: Path, only: str | None = None, *, may_come: bool = False) -> None:
        if not (folder.is_dir() or (may_come and not folder.exists())):
            raise LogUnreadable(
                f"no folder {str(folder)!r}",
                expected="one that holds logs of runs",
                hint="Name the folder that WANSHIM_PROGRESS_DIR named, or training_logs in the output folder",
            )
        self.folder = folder.resolve()
        self.only = only
        self.runs: dict[str, RunLog] = {}
        self.left_out: list[str] = []  # runs that are not read, because they are older
        self.lock = threading.RLock()  # held while reading files: take it to look at curves

    def update(self) -> None:
        """Read what is new, at most a chunk of each file."""
        with self.lock:
            found = self._folders()
            self.runs = {id_: self.runs.get(id_) or RunLog(id_, folder) for id_, folder in found.items()}
            for id_, run in list(self.runs.items()):
                try:
                    run.update()
                except FileNotFoundError:
                    del self.runs[id_]

    def update_fully(self, limit_s: float = 60.0) -> None:
        """Read to the end of all files, for callers that look once."""
        deadline = time.monotonic() + limit_s
        self.update()
        while any(run.reading for run in self.runs.values()) and time.monotonic() < deadline:
            self.update()

    def names(self) -> list[str]:
        """Names of all runs, however many."""
        return sorted(self._all())

    def _all(self) -> dict[str, Path]:
        """DIR itself where it is a run, and the runs in it; never through a link."""
        try:
            below = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False))
        except OSError as error:
            raise LogUnreadable(f"{self.folder} cannot be read: {error.strerror}") from error
        found = {_id(name): self.folder / name for name in below if _is_run(self.folder / name)}
        if _is_run(self.folder):
            own = _id(self.folder.name)
            found["." if own in found else own] = self.folder
        return found

    def _folders(self) -> dict[str, Path]:
        found = self._all()
        if self.only is not None:
            self.left_out = []
            return {id_: folder for id_, folder in found.items() if self.only in (id_, folder.name)}
        order = (
            sorted(found, key=lambda id_: _last_written(found[id_]), reverse=True) if len(found) > MOST_RUNS else found
        )
        self.left_out = sorted(islice(order, MOST_RUNS, None))
        return {id_: found[id_] for id_ in islice(order, MOST_RUNS)}


def _id(name: str) -> str:
    """A folder's name, if it can be printed; else what of it can, and a hash that distinguishes it."""
    shown = text(name, 255)
    return shown if shown == name else f"{shown}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """At most MOST_FILES of a folder."""
    with os.scandir(folder) as entries:
        yield from islice(entries, MOST_FILES)


def _is_of_run(entry: os.DirEntry[str]) -> bool:
    return entry.name == "run.json" or LOG_NAME.fullmatch(entry.name) is not None


def _is_run(folder: Path) -> bool:
    """One that cannot be looked into counts: it must not be passed over."""
    try:
        return any(_is_of_run(entry) for entry in _entries(folder))
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))


def _last_written(folder: Path) -> float:
    """The newest modification of a run's files, by the clock of the file system."""
    try:
        times = [entry.stat(follow_symlinks=False).st_mtime for entry in _entries(folder) if _is_of_run(entry)]
    except OSError:
        return time.time()  # not known, so not to be left out
    return max(times, default=0.0)
