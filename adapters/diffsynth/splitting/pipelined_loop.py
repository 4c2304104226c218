"""DiffSynth's training loop over a split: its undo, taken over for one call of `launch_training_task`.

The loop itself stays as it is. What it calls is answered by attributes set on the living objects: the
prepared model hands a forward to the pipeline, `accelerator.backward` hands it the backward, the optimizer's
step waits for it. Everything is back as it was when the task ends, however it ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint

from wanshim.adapters.diffsynth.splitting import side_models
from wanshim.adapters.diffsynth.training_road import Row, Run
from wanshim.core.model_split.quantize import quantized_names
from wanshim.core.pipeline import PendingLoss, Pipeline, in_pipeline
from wanshim.core.pipeline.average_gradients import average_gradients
from wanshim.core.shared.files import written_whole
from wanshim.undo import Undo

BYPASS = "ACCELERATE_BYPASS_DEVICE_MAP"  # accelerate#1368: lets DDP take a model that lies on several devices
IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's: what DDP neither sends round nor checks


def keep_out_of_ddp(model: torch.nn.Module, names: Sequence[str], undo: Undo) -> None:
    """DDP sends every parameter and buffer of `model` round when it is made, but not these, until `undo` ends."""
    if names:
        undo.set(model, {IGNORED: [*vars(model).get(IGNORED, ()), *names]})


def after_prepare(accelerator: Any, undo: Undo, act: Callable[[Any], object]) -> None:
    """Until `undo` ends, `act` gets each object that `accelerator.prepare` gives back."""

    def prepare(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepared(*args: object, **kwargs: object) -> Any:
            result = original(*args, **kwargs)
            for item in result if isinstance(result, tuple) else (result,):
                act(item)
            return result

        return prepared

    undo.replace(accelerator, "prepare", prepare)


def save_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """`accelerator.save` that never leaves half a file: what is written takes its name only when it is complete."""

    def save(obj: object, f: object, *args: object, **kwargs: object) -> Any:
        if not isinstance(f, (str, os.PathLike)):
            return original(obj, f, *args, **kwargs)
        if not Path(f).parent.is_dir():
            return original(obj, f, *args, **kwargs)
        with written_whole(Path(f)) as part:  # every process gets one, and one of them writes
            return original(obj, str(part), *args, **kwargs)

    return save


def checkpoint_in_pipeline(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.utils.checkpoint.checkpoint` that leaves the random state alone in a pipeline: replaying draws sets the
    generators of the whole process back, and two micro-batches would do it at once. A model that draws is refused."""

    def checkpoint(*args: object, **kwargs: object) -> Any:
        if in_pipeline():
            kwargs["preserve_rng_state"] = False
        return original(*args, **kwargs)

    return checkpoint


class PipelinedLoop:
    """The calls of the loop through which its micro-batches go into a pipeline."""

    def __init__(self, pipeline: Pipeline, accelerator: Any, model: Any, logger: Any, undo: Undo) -> None:
        self.pipeline = pipeline
        self.accelerator = accelerator
        self.model = model
        self._later: list[Callable[[], object]] = []  # the logger's calls, in order
        self._undo = undo
        undo.replace(torch.utils.checkpoint, "checkpoint", checkpoint_in_pipeline)
        undo.add(pipeline.remove)
        after_prepare(accelerator, undo, self._take_over)
        undo.replace(accelerator, "backward", self._backward)
        undo.replace(logger, "on_step_end", self._on_step_end)

    def _take_over(self, item: object) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        if isinstance(item, AcceleratedOptimizer):
            for name in ("step", "zero_grad"):  # DiffSynth 2.0.0 clears the gradients before the last forward
                self._undo.replace(item, name, self._after_join)
        elif isinstance(item, torch.nn.parallel.DistributedDataParallel) and item.module is self.model:
            # Not through DDP: its reducer knows one backward at a time. Gradients are reduced at the join.
            self._undo.replace(item, "forward", lambda _: self._forward(item.module))
        elif item is self.model:
            self._undo.replace(item, "forward", self._forward)

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: object, **kwargs: object) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            return self.pipeline.submit(partial(original, *args, **kwargs), (args, kwargs))

        return forward

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: torch.Tensor, **kwargs: object) -> Any:
            if not isinstance(loss, PendingLoss):
                return original(loss, **kwargs)
            return self.pipeline.backward(loss, lambda real: original(real, **kwargs))

        return backward

    def _after_join(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: object, **kwargs: object) -> Any:
            if self.accelerator.sync_gradients and self.pipeline.pending:
                self._join()
            return original(*args, **kwargs)

        return act

    def _join(self) -> None:
        self.pipeline.join()
        if self.accelerator.num_processes > 1:
            average_gradients(self.model.parameters())
        later, self._later = self._later, []
        for act in later:
            act()

    def _on_step_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Logging a loss waits for it, so it is done when the pipeline is joined: same values, same order, and
        a checkpoint that falls on this micro-batch still holds the weights from before the step."""

        def call(*args: object, **kwargs: object) -> Any:
            real = {k: v.wait() if isinstance(v, PendingLoss) else v for k, v in kwargs.items()}
            return original(*args, **real)

        def on_step_end(*args: object, **kwargs: object) -> Any:
            if not self.pipeline.pending:
                return call(*args, **kwargs)
            self._later.append(partial(call, *args, **kwargs))
            return None

        return on_step_end


def over_stages(run: Run, row: Row) -> None:
    """Have a run over stages save whole files, and DDP take a model that lies on several devices."""
    call, undo = run.call, run.undo
    undo.replace(call.accelerator, "save", save_whole)
    # torchrun's one process is distributed for accelerate, too, and gets DDP.
    if call.accelerator.distributed_type.name != "NO":
        undo.set_variable(BYPASS, "true")
        row.report(f"{BYPASS}=true: each process trains a split of its own, {call.accelerator.num_processes} in all")
        # DDP can neither flatten a quantised weight nor mix GPU and host. Such weights are frozen, and every process
        # has them from the same file.
        frozen = [*quantized_names(call.model, trained=False), *side_models.parameters_on_host(call.model)]
        keep_out_of_ddp(call.model, frozen, undo)


def in_pipeline_of(run: Run, row: Row) -> None:
    """Have the loop's micro-batches go into a pipeline over the stages until the run ends."""
    assert run.handle is not None  # or there was no pipeline in the plan
    call = run.call
    PipelinedLoop(Pipeline(run.handle), call.accelerator, call.model, call.logger, run.undo)
