"""Records a training run from inside its loop, without making it wait.

The training thread takes times and puts a small record on a queue; a thread of the recorder waits for the
loss, reads the GPUs, writes the log and draws the progress.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from wanshim.core.shared.forks import Owner
from wanshim.core.shared.gpus import GpuMeter, GpuReading
from wanshim.core.shared.processes import namespace, process_start
from wanshim.core.training import progress_log
from wanshim.core.training.accounting import GlobalSteps, StepAccounting
from wanshim.core.training.deferred_loss import DeferredLoss
from wanshim.core.training.eta import StepEta
from wanshim.core.training.progress_log import ProgressLog
from wanshim.errors import WanshimError

log = logging.getLogger("wanshim")

CLOSE_S = 10.0
PAUSES = {"checkpoint": "checkpoint saved", "validation": "validated"}  # the event of its end, by that of its begin


@dataclass(frozen=True)
class TrainingRun:
    """A training run as it is recorded.

    Args:
        name: for people.
        framework: and version, as text.
        output_path: where the run saves its checkpoints; names the run's folder.
        accounting: None where the dataset has no length.
        processes: that write a log each, also those that share a sample; 0: those that the accounting counts.
        checkpoints, validations: how many this attempt makes; 0 where nobody knows.
        done: steps of the record that an earlier attempt made and this one goes on from.
    """

    name: str
    framework: str
    output_path: str
    accounting: StepAccounting | GlobalSteps | None
    processes: int = 0
    checkpoints: int = 0
    validations: int = 0
    done: int = 0


@dataclass(frozen=True)
class StepRecord:
    """One step. Seconds are those of the step without its checkpoints and validations."""

    step: int
    optimizer_step: int
    epoch: int
    t: float
    seconds: float
    checkpoint_seconds: float
    validation_seconds: float
    lr: float | None
    loss: float | None = None
    gpus: dict[str, GpuReading] = field(default_factory=dict)


class Display(Protocol):
    """Something that shows the run while it goes on."""

    def start(self, run: TrainingRun) -> None: ...
    def step(self, record: StepRecord, pace: StepEta) -> None: ...
    def stop(self, state: str) -> None: ...


class RunRecorder:
    """One process's part of a run. Call `begin_step`, `end_step` around each step, then `close`. A step is a
    micro-batch under `StepAccounting`, an optimizer step under `GlobalSteps`.

    Args:
        folder: of all runs; this one logs to `progress_log.run_folder(folder, run.output_path)`, or beside it
            where another job logs there.
        rank: of this process among the data-parallel ones.
        devices: of this process: one, or the stages of a split model.
        display: None for all ranks but the one that shows progress.

    Raises:
        OSError: the log cannot be opened.
    """

    def __init__(
        self, folder: Path, run: TrainingRun, rank: int, devices: Sequence[str], display: Display | None = None
    ) -> None:
        self.run, self.rank, self.devices = run, rank, tuple(devices)
        self.steps = run.done
        self.optimizer_steps = run.accounting.optimizer_steps_in(run.done) if run.accounting else run.done
        self._log = ProgressLog(progress_log.run_folder(folder, run.output_path), rank, devices)
        self.folder = self._log.folder
        self._meter = GpuMeter(self._log.devices)
        self._display = display
        accounting = run.accounting
        self._pace = StepEta(
            accounting.recorded_steps if accounting else None,
            accounting.recorded_group if accounting else 1,
            run.checkpoints,
            run.validations,
            run.done,
        )
        self._started_at = time.time()
        self._mark = time.perf_counter()
        self._depth = 0
        self._paused = dict.fromkeys(PAUSES, 0.0)
        self._epoch = 0
        self._lr: float | None = None
        self._closed = False
        self._owner = Owner("a recorder")
        self._queue: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="wanshim-progress", daemon=True)
        self._write_run("running")
        self._thread.start()
        self._queue.put(("start", None, None))

    # -- on the training thread ----------------------------------------------------------------------

    def begin_step(self, epoch: int, learning_rate: float | None) -> None:
        """A step begins. The learning rate is read here, before a scheduler moves it on."""
        self._epoch, self._lr = epoch, learning_rate

    def end_step(self, loss: Any, *, steps_optimizer: bool) -> None:
        """The step is done.

        Args:
            loss: see `DeferredLoss`.
            steps_optimizer: it was, or ended, an accumulation group.
        """
        if not self._owner.is_here:  # the log and its thread are the parent's
            return
        now = time.perf_counter()
        self.steps += 1
        self.optimizer_steps += steps_optimizer
        seconds = max(0.0, now - self._mark - sum(self._paused.values()))
        record = (self.steps, self.optimizer_steps, self._epoch, time.time(), seconds, *self._paused.values())
        self._queue.put(("step", (*record, self._lr), DeferredLoss(loss)))
        self._mark, self._paused = now, dict.fromkeys(self._paused, 0.0)

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Around a checkpoint or a validation, one of PAUSES. Nested pauses count once, as the outer one."""
        self._depth += 1
        begin = time.perf_counter()
        if self._depth == 1:
            self._queue.put(("event", {"event": kind, "t": time.time(), "step": self.steps}, None))
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                took = time.perf_counter() - begin
                self._paused[kind] += took
                done = {"event": PAUSES[kind], "t": time.time(), "step": self.steps, "seconds": took}
                self._queue.put(("event", done, None))

    def close(self, state: str = "finished", error: str | None = None, resumes_at: int | None = None) -> None:
        """Write what is left and end this attempt. Waits ten seconds at most; safe to call twice.

        Args:
            state: "finished", "stopped" or "failed".
            error: what ended it, one line.
            resumes_at: the optimizer step of the state that a stopped run has saved.
        """
        if self._closed or not self._owner.is_here:
            return
        self._closed = True
        end = {"event": "end", "t": time.time(), "state": state, "error": error, "resumes_at": resumes_at}
        end |= {"step": self.steps, "optimizer_step": self.optimizer_steps}
        self._queue.put(("end", end, None))
        self._thread.join(CLOSE_S)
        self._write_run(state)

    # -- on the recorder's thread --------------------------------------------------------------------

    def _work(self) -> None:
        """Whatever goes wrong here ends the recording, with one warning, and never the training."""
        try:
            kind = ""
            while kind != "end":
                kind, record, loss = self._queue.get()
                if self._log.restore():
                    self.folder = self._log.folder
                    self._write_run("running")
                if kind == "step":
                    self._step(StepRecord(*record), loss)
                elif kind == "start":
                    self._start()
                else:
                    self._log.write(record)
            if self._display is not None:
                self._display.stop(record["state"])
        except Exception:
            log.warning("wanshim: the progress of rank %d is no longer recorded", self.rank, exc_info=True)
        finally:
            self._log.close()

    def _start(self) -> None:
        self._log.write(
            {
                "event": "start",
                "t": self._started_at,
                "rank": self.rank,
                "pid": os.getpid(),
                "process_started": process_start(os.getpid()),
                "namespace": namespace(),
                "host": socket.gethostname(),
                "devices": list(self._log.devices),
                "done": self.run.done,
                "optimizer_step": self.optimizer_steps,
            },
            {d: {"device": d, "gpu_absent": self._meter.absent.get(d)} for d in self._log.devices},
        )
        if self._display is not None:
            self._display.start(self.run)

    def _step(self, record: StepRecord, loss: DeferredLoss) -> None:
        gpus = self._meter.read()
        record = StepRecord(**{**vars(record), "loss": loss.value(), "gpus": gpus})
        line = {
            "step": record.step,
            "optimizer_step": record.optimizer_step,
            "epoch": record.epoch,
            "t": round(record.t, 3),
            "loss": progress_log.number(record.loss),
            "lr": progress_log.number(record.lr),
            "seconds": round(record.seconds, 6),
        }
        for pause in ("checkpoint_seconds", "validation_seconds"):
            if seconds := getattr(record, pause):
                line[pause] = round(seconds, 6)
        self._log.write(line, {device: asdict(reading) for device, reading in gpus.items()})
        self._pace.add(record.seconds, record.checkpoint_seconds, record.validation_seconds)
        if self._display is not None:
            self._display.step(record, self._pace)

    def _write_run(self, state: str) -> None:
        """run.json is rank 0's."""
        if self.rank != 0:
            return
        accounting = self.run.accounting
        description = {
            "name": self.run.name,
            "framework": self.run.framework,
            "output_path": self.run.output_path,
            "state": state,
            "started": self._started_at,
            "ended": None if state == "running" else time.time(),
            "accounting": accounting.to_dict() if accounting else None,
            "processes": self.run.processes or (accounting.processes if accounting else 0),
            "checkpoints": self.run.checkpoints,
            "validations": self.run.validations,
        }
        try:
            progress_log.write_run(self.folder, description)
        except (OSError, WanshimError) as error:
            log.warning("wanshim: run.json cannot be written: %s", error)
