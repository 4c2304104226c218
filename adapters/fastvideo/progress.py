"""`fastvideo.progress`: the steps, pace and GPUs of a FastVideo training run, logged and shown.

Two families of trainers: `fastvideo.train.trainer.Trainer` (0.2.0) and the training pipelines of
`fastvideo.training`. Each has one method that is the whole run and a `tqdm` of its module that knows where the
run goes on from. While that method runs, its `tqdm` gives way to one progress of the run, and the checkpoint
and validation calls of the living objects show how long they took. The unit is FastVideo's own global step: an
optimizer step. What is recorded, and how, is `wanshim.core.training`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wanshim.patching import Feature, Finding, Kind, Seam, SeamState, SourceTree
from wanshim.patching.verdict import Verdict
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.training.recorder import RunRecorder

    from .training_run import Description

_recording_now: list[object] = []  # a training pipeline's `train` may call that of its base class


class RecordedRun:
    """One run of a trainer. The log opens when the loop shows its bar: a resumed run knows its step by then.

    Args:
        describe: called with the steps that earlier attempts made.
        optimizers: returns those of the step that begins.
    """

    def __init__(self, describe: Callable[[int], Description], optimizers: Callable[[], Any], seam: SeamState) -> None:
        from wanshim.core.training.recording import Recording

        self._describe, self._optimizers = describe, optimizers
        read = seam.settings
        self.recording = Recording(
            read.progress_dir, FEATURE.name, strict=read.strict, note=seam.notes.append, without_effect=seam.fall_back
        )
        self.loss: Any = None

    @property
    def recorder(self) -> RunRecorder | None:
        return self.recording.recorder

    def open(self, done: int) -> None:
        self.recording.open(lambda: self._describe(done))

    def begin_step(self) -> None:
        self.loss = None
        if self.recorder is not None:
            optimizers = self._optimizers()
            self.recorder.begin_step(0, float(optimizers[0].param_groups[0]["lr"]) if optimizers else None)

    def end_step(self) -> None:
        if self.recorder is not None:
            self.recorder.end_step(self.loss, steps_optimizer=True)

    def pausing(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A callable whose time is a checkpoint's or a validation's, not a step's."""

        def call(*args: object, **kwargs: object) -> Any:
            if self.recorder is None:
                return original(*args, **kwargs)
            with self.recorder.pause(kind):
                return original(*args, **kwargs)

        return call


class Bar:
    """Stands for the loop's `tqdm`. Where the log could not be opened, FastVideo's own stays."""

    def __init__(self, job: RecordedRun, steps: Iterable[int], initial: int) -> None:
        self._job, self._steps = job, steps
        job.open(max(0, initial))

    def __iter__(self) -> Iterator[int]:
        """The new trainer goes through its bar; a step ends by its callback."""
        for step in self._steps:
            self._job.begin_step()
            yield step

    def update(self, count: int = 1) -> None:
        """The pipelines push theirs, once a step, when the loss is known and nothing is saved yet."""
        self._job.end_step()

    def set_postfix(self, *args: object, **kwargs: object) -> None: ...

    def close(self) -> None: ...


def _show(job: RecordedRun, their_tqdm: type[Any]) -> Any:
    def tqdm(steps: Iterable[int], *args: object, initial: int = 0, **kwargs: object) -> Any:
        bar = Bar(job, steps, initial)
        return bar if job.recorder is not None else their_tqdm(steps, *args, initial=initial, **kwargs)

    return tqdm


@contextmanager
def _recording(job: RecordedRun) -> Iterator[Undo]:
    """Every way out puts back what was replaced and closes the log."""
    with job.recording.of_run(), Undo() as undo:
        _recording_now.append(job)
        undo.add(functools.partial(_recording_now.remove, job))
        yield undo


def _record_trainer(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    from .training_run import run_of_trainer, validation_interval, validation_interval_of_method

    signature = inspect.signature(original)

    def run(self: Any, *args: object, **kwargs: object) -> Any:
        if _recording_now or not seam.enter():
            return original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        method, manager = arguments["method"], arguments.get("checkpoint_manager")
        describe = functools.partial(run_of_trainer, self, method, arguments["max_steps"], manager)
        job = RecordedRun(describe, lambda: _optimizers(method), seam)
        with _recording(job) as undo:
            undo.replace(sys.modules[seam.seam.module], "tqdm", functools.partial(_show, job))
            undo.replace(self.callbacks, "on_training_step_end", functools.partial(_end_step, job))
            for callback in self.callbacks._callbacks.values():
                if every := validation_interval(callback):
                    undo.replace(callback, "on_validation_begin", functools.partial(_validate, job, every))
            if every := validation_interval_of_method(method):
                undo.replace(method, "on_validation_begin", functools.partial(_validate, job, every))
            if manager is not None:
                undo.replace(manager, "save", functools.partial(job.pausing, "checkpoint"))
            return original(self, *args, **kwargs)

    return run


def _end_step(job: RecordedRun, original: Callable[..., Any]) -> Callable[..., Any]:
    """The new trainer gives its callbacks the means over the accumulation group, as numbers."""

    def on_training_step_end(method: Any, metrics: Any, *args: object, **kwargs: object) -> Any:
        job.loss = metrics.get("total_loss")
        job.end_step()
        return original(method, metrics, *args, **kwargs)

    return on_training_step_end


def _optimizers(method: Any) -> Any:
    """The student's. Distillation lists its critic's before it, which has a learning rate of its own."""
    student = method._optimizer_dict.get("student")
    return method.get_optimizers(0) if student is None else [student]


def _validate(job: RecordedRun, every: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """The callback is asked at each step, and so is the method itself in 0.2.1; each validates at some."""
    signature, pausing = inspect.signature(original), job.pausing("validation", original)

    def on_validation_begin(*args: object, **kwargs: object) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        iteration = given.get("iteration", kwargs.get("iteration", args[-1] if args else 0))
        return (original if iteration % every else pausing)(*args, **kwargs)

    return on_validation_begin


def _record_pipeline(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    from .training_run import run_of_pipeline

    module = sys.modules[seam.seam.module]

    def train(self: Any, *args: object, **kwargs: object) -> Any:
        if _recording_now or not seam.enter():
            return original(self, *args, **kwargs)
        job = RecordedRun(functools.partial(run_of_pipeline, self), lambda: [self.optimizer], seam)
        with _recording(job) as undo:
            undo.replace(module, "tqdm", functools.partial(_show, job))
            undo.replace(self, "train_one_step", functools.partial(_one_step, job))
            undo.replace(self, "_log_validation", functools.partial(job.pausing, "validation"))
            for name in ("save_checkpoint", "save_distillation_checkpoint"):
                if hasattr(module, name):
                    undo.replace(module, name, functools.partial(job.pausing, "checkpoint"))
            return original(self, *args, **kwargs)

    return train


def _one_step(job: RecordedRun, original: Callable[..., Any]) -> Callable[..., Any]:
    def train_one_step(*args: object, **kwargs: object) -> Any:
        job.begin_step()
        batch = original(*args, **kwargs)
        job.loss = getattr(batch, "total_loss", None)
        return batch

    return train_one_step


def _seam(target: str, replace: Callable[[Any, SeamState], Any]) -> Seam:
    return Seam(
        f"fastvideo.{target}",
        replace,
        why="the run begins and ends here; its bar shows no loss, no GPU and a mean of all it ever did",
        upstream="https://github.com/hao-ai-lab/FastVideo (no request of its own)",
        remove_when="FastVideo logs every rank, its GPUs, and an ETA without checkpoints and validations",
        kind=Kind.WRAPT,
        required=False,
        stacks=True,
    )


def _judge(source: SourceTree) -> Finding | None:
    """All seams may be missing, but not at once."""
    if any(source.node(target) is not None for target in FEATURE.targets):
        return None
    return Finding(Verdict.ABSENT, "this FastVideo has no trainer that wanshim knows")


FEATURE = Feature(
    name="fastvideo.progress",
    summary="steps, ETA, loss and every rank of a training run: a progress bar, and a log for `wanshim monitor`",
    switched_on_by="progress_dir",
    judge=_judge,
    seams=(
        _seam("train.trainer:Trainer.run", _record_trainer),
        _seam("training.training_pipeline:TrainingPipeline.train", _record_pipeline),
        _seam("training.distillation_pipeline:DistillationPipeline.train", _record_pipeline),
        _seam("training.self_forcing_distillation_pipeline:SelfForcingDistillationPipeline.train", _record_pipeline),
    ),
)
