"""`diffsynth.progress`: the steps, pace and GPUs of a run under `launch_training_task` or
`launch_dmd2_training_task`, logged and shown.

DiffSynth shows one tqdm an epoch and process, counted in micro-batches, and `ModelLogger.num_steps` counts
micro-batches too. Here the loop's `tqdm` gives way, while it trains, to one progress of the whole run;
`ModelLogger` says when a micro-batch is done and when a checkpoint is saved. What is recorded, and how, is
`wanshim.core.training`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.training_road import (
    LAUNCHER,
    TrainingCall,
    loop_seam,
    say_without_effect,
    share_output_folder,
    watch_steps,
)
from wanshim.patching import Feature, SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.training import StepAccounting
    from wanshim.core.training.recorder import RunRecorder, TrainingRun

_job: ContextVar[RecordedRun | None] = ContextVar("wanshim_training_job", default=None)


class RecordedRun:
    """One call of a launcher in `module`, whose steps are recorded."""

    def __init__(self, module: str, call: TrainingCall, seam: SeamState) -> None:
        from wanshim.core.training.recording import Recording

        self.module = sys.modules[module]
        self.call, self.accelerator = call, call.accelerator
        self.output_path = str(call.logger.output_path)
        self.seam = seam
        self.their_tqdm = vars(self.module)["tqdm"]
        read = seam.settings
        self.recording = Recording(
            read.progress_dir, FEATURE.name, strict=read.strict, note=seam.notes.append, without_effect=seam.fall_back
        )
        self._optimizer = len(getattr(self.accelerator, "_optimizers", ()))  # the place of this run's first one
        self._epoch = 0
        self._ended = True
        self._loss: Any = None

    @property
    def recorder(self) -> RunRecorder | None:
        return self.recording.recorder

    def steps(self, dataloader: Any, *args: object, **kwargs: object) -> Iterator[Any]:
        """In place of `tqdm(dataloader)`: one epoch, its micro-batches recorded."""
        if not self.recording.was_opened:
            self.recording.open(lambda: self._describe(dataloader))
        if self.recorder is None:
            yield from self.their_tqdm(dataloader, *args, **kwargs)
            return
        for batch in dataloader:
            self._ended, self._loss = False, None
            self.recorder.begin_step(self._epoch, self._learning_rate())
            yield batch
            if not self._ended:  # a logger of the user's own, which does not call ModelLogger's
                self.end_step()
        self._epoch += 1

    def note_output(self, module: object, inputs: object, output: Any) -> None:
        """A forward hook. DiffSynth 2.0.0 gives the logger no loss, and a pipeline gives it late."""
        self._loss = output.get("total_loss") if isinstance(output, dict) else output  # DMD2 gives several

    def end_step_of_logger(self) -> None:
        """The logger was told of a micro-batch. Before this one's forward it can only be an earlier one's, told
        late by a pipeline, whose log line is written already."""
        if self._loss is not None:
            self.end_step()

    def end_step(self) -> None:
        if self.recorder is not None and not self._ended:
            self._ended = True
            loss, self._loss = self._loss, None
            self.recorder.end_step(loss, steps_optimizer=bool(self.accelerator.sync_gradients))

    def _describe(self, dataloader: Any) -> tuple[TrainingRun, int, tuple[str, ...]]:
        from importlib.metadata import version

        from wanshim.core.training.recorder import TrainingRun

        accounting = self._accounting(dataloader)
        run = TrainingRun(
            name=Path(self.output_path).resolve().name,
            framework=f"diffsynth {version('diffsynth')}",
            output_path=str(Path(self.output_path).resolve()),
            accounting=accounting,
            processes=_world_size(),
            checkpoints=self._checkpoints(accounting),
            done=getattr(dataloader, "batches_before", 0),  # where `diffsynth.resume` goes on
        )
        return run, self.accelerator.process_index, self._devices()

    def _checkpoints(self, accounting: StepAccounting | None) -> int:
        """One each `save_steps` and at the end; without, one an epoch."""
        if accounting is None:
            return 0
        save_steps = self.call.option("save_steps")
        return -(-accounting.micro_steps // save_steps) if save_steps else accounting.epochs

    def _accounting(self, dataloader: Any) -> StepAccounting | None:
        """From the dataset, and checked against the loader that accelerate prepared: that one decides."""
        from wanshim.core.training import StepAccounting

        try:
            samples, per_epoch = len(self.call.dataset), len(dataloader)
        except TypeError:
            return None
        state = self.accelerator.gradient_state
        common: dict[str, Any] = {
            "epochs": self.call.option("num_epochs"),
            "gradient_accumulation": self.accelerator.gradient_accumulation_steps,
            "groups_cross_epochs": not state.sync_with_dataloader,
        }
        repeat = getattr(self.call.dataset, "repeat", 1)
        repeat = repeat if isinstance(repeat, int) and repeat > 0 and samples % repeat == 0 else 1
        steps = StepAccounting(samples // repeat, repeat, processes=self.accelerator.num_processes, **common)
        if steps.micro_steps_per_epoch != per_epoch:
            self.seam.notes.append(f"the loader gives {per_epoch} micro-batches an epoch, not ceil({samples} samples)")
            processes = self.accelerator.num_processes
            steps = StepAccounting(per_epoch * processes, processes=processes, **common)
        return steps

    def _devices(self) -> tuple[str, ...]:
        """A split model's stages, else the device of the accelerator."""
        from wanshim.core.model_split import split_of

        handle = split_of(self.call.dit) if self.call.dit is not None else None
        return handle.plan.devices if handle is not None else (str(self.call.device),)

    def _learning_rate(self) -> float | None:
        """The rate of the first parameter group of the run's first optimizer (DMD2: the student's)."""
        optimizers = getattr(self.accelerator, "_optimizers", ())[self._optimizer :]
        return float(optimizers[0].param_groups[0]["lr"]) if optimizers else None


def _world_size() -> int:
    """All processes of the job: accelerate counts groups where each sample is sharded over several."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def _recording(job: RecordedRun) -> Iterator[None]:
    """While this lasts the loop's `tqdm` is the job's; every way out closes the log."""
    with job.recording.of_run(), Undo() as undo:
        undo.add(partial(_job.reset, _job.set(job)))
        undo.add(job.call.model.register_forward_hook(job.note_output).remove)
        undo.set(job.module, {"tqdm": job.steps})
        yield


def _record_run(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    def say_that_nothing_is_logged() -> bool:
        past = _job.get() is None and seam.settings.is_on("progress_dir")
        return past and say_without_effect(seam, FEATURE.name, "progress_dir", "nothing is logged")

    if seam.seam.target == LAUNCHER:
        watch_steps(seam, say_that_nothing_is_logged)
    signature = inspect.signature(original)

    def launch(*args: object, **kwargs: object) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        call = TrainingCall.bind(signature, args, kwargs)
        share_output_folder(call)
        with _recording(RecordedRun(seam.seam.module, call, seam)):
            return original(*args, **kwargs)

    return launch


def _record_step(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    def on_step_end(self: object, *args: object, **kwargs: object) -> Any:
        if (job := _job.get()) is not None and job.recorder is not None and seam.enter():
            # Before the original: its checkpoint belongs to the next interval, and its loggers may wait for the loss.
            job.end_step_of_logger()
        return original(self, *args, **kwargs)

    return on_step_end


def _record_checkpoint(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    def save(self: object, *args: object, **kwargs: object) -> Any:
        recorder = job.recorder if (job := _job.get()) is not None else None
        with recorder.pause("checkpoint") if recorder is not None and seam.enter() else nullcontext():
            return original(self, *args, **kwargs)

    return save


_WHY_SAVES = "its time is no step's time"


_seam = partial(
    loop_seam,
    upstream="https://github.com/modelscope/DiffSynth-Studio/pull/1470 (closed: micro and optimizer steps)",
    remove_when="DiffSynth logs total steps, ETA and the memory of every GPU of a process itself",
)

FEATURE = Feature(
    name="diffsynth.progress",
    summary="steps, ETA, loss and every GPU of a training run: a progress bar, and a log for `wanshim monitor`",
    switched_on_by="progress_dir",
    seams=(
        _seam(
            LAUNCHER,
            _record_run,
            why="the run begins and ends here, and its bar is per epoch",
        ),
        _seam(
            "diffsynth.diffusion.dmd2:launch_dmd2_training_task",
            _record_run,
            why="a loop and a bar of its own",
            required=False,
        ),
        _seam(
            "diffsynth.diffusion.logger:ModelLogger.on_step_end",
            _record_step,
            why="the one place that every micro-batch ends at",
        ),
        _seam("diffsynth.diffusion.logger:ModelLogger.on_epoch_end", _record_checkpoint, why=_WHY_SAVES),
        _seam("diffsynth.diffusion.logger:ModelLogger.save_model", _record_checkpoint, why=_WHY_SAVES),
    ),
)
