"""Pipeline: micro-batches that follow each other through the stages of a split model.

A caller that accumulates gradients writes what it always did: forward, backward, forward, backward, step.
`submit` answers a forward with a PendingLoss as soon as the part before the blocks has run, `backward`
answers at once, and `join` before the optimizer's step waits until everything has been issued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from wanshim.core.model_split.split import SplitHandle
from wanshim.core.pipeline.micro_batch import MicroBatchRun, current
from wanshim.core.pipeline.pending_loss import PendingLoss
from wanshim.core.pipeline.schedule import Abandoned, Schedule
from wanshim.core.pipeline.stages import PROLOGUE, Stages
from wanshim.core.sequence.run import backward_runs
from wanshim.core.shared.forks import Owner
from wanshim.errors import WanshimError
from wanshim.undo import Undo

END_SECONDS = 30.0  # how long the other micro-batches may take to notice that one failed


def refusal(model: nn.Module) -> str | None:
    """Why micro-batches of this model cannot overlap, or None.

    Checkpointing replays a block's random draws by setting the generator of the whole process back, which
    two micro-batches cannot do at the same time.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name} drops out at random (p={module.p}), and the order of draws would depend on timing"
    return None


class Pipeline:
    """Pipelined micro-batches over a split. Attached until `remove()`.

    In flight are never more micro-batches than stages. Losses and gradients are those of one micro-batch
    after the other, bit for bit: each parameter's gradient is added up in the order of submission.
    Compute of a stage runs on the default stream of its device; what comes before the first block and after
    the last one runs on a stream of its own on the home device.
    Where modules before the blocks train, whatever they feed besides the blocks must be an exit of the split. The loss
    depends on the blocks by the output of the last one alone.
    Checkpointing inside the blocks must not preserve the random state (`preserve_rng_state=False`).
    """

    def __init__(self, handle: SplitHandle) -> None:
        self._owner = Owner("a pipeline")
        self.stages = Stages(handle.plan)
        self.schedule = Schedule(len(self.stages.streams))
        self._runs: list[MicroBatchRun] = []
        self._weights = {id(weight) for _, unit in handle.units for module in unit for weight in module.parameters()}
        self._undo = handle.attach(Undo())
        self._undo.set(handle.draws, {"are_carried": False})
        for i, (stage, modules) in enumerate(handle.units):
            last = i + 1 == len(handle.units) or handle.units[i + 1][0] != stage
            for module in modules:
                before, after = partial(self._before, stage), partial(self._after, stage, last)
                self._undo.add(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
                self._undo.add(module.register_forward_hook(after, prepend=True).remove)

    # --- for the training loop

    @property
    def pending(self) -> int:
        """Micro-batches submitted since the last join."""
        return len(self._runs)

    def submit(self, forward: Callable[[], torch.Tensor], inputs: Any = None) -> PendingLoss:
        """Start a micro-batch.

        Returns when everything before the first block has run, so random draws keep their order.

        Args:
            forward: computes the scalar loss; runs in a thread of its own.
            inputs: what it reads; tensors in it are kept from reuse while the micro-batch reads them.

        Raises:
            Exception: what this or an earlier micro-batch raised.
        """
        self._owner.check()
        self.schedule.lead()
        last = len(self._runs) - 1
        # one at most waits for its turn
        self._wait(lambda: last < 0 or self._runs[last].stage > PROLOGUE, f"the start of micro-batch {last}")
        side = self.stages.side
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor) and tensor.device == side.device and side.stream is not None:
                tensor.record_stream(side.stream)
        run = MicroBatchRun(self.stages, self.schedule, len(self._runs), forward, self._weights)
        self._runs.append(run)
        try:
            run.start()
        except RuntimeError as error:  # the system gives no more threads
            self.schedule.fail(error)
            raise
        self._wait(lambda: run.entered or run.finished, f"the first block of micro-batch {run.number}")
        return PendingLoss(partial(self._loss_of, run))

    def backward(self, loss: PendingLoss, start: Callable[[torch.Tensor], object]) -> None:
        """Begin a micro-batch's backward when its loss is there; returns at once.

        Args:
            start: the caller's own way to begin it, called with the real loss in the micro-batch's thread.
        """
        self._owner.check()
        run = loss._value.args[0]  # type: ignore[attr-defined]
        self.schedule.lead()
        run.start_backward, run.asked = start, True
        self.schedule.notify()

    def join(self) -> None:
        """Wait until all of it has been issued; what the caller issues next comes after it on every device.

        Raises:
            Exception: what a micro-batch raised.
        """
        self._owner.check()
        idle = [run.number for run in self._runs if not run.asked and not run.finished]
        if idle:
            error = WanshimError(f"no backward was asked for micro-batches {idle}", expected="one for each loss")
            self.schedule.fail(error)
        self.schedule.lead()
        self.schedule.close(len(self._runs))
        self._wait(lambda: all(run.finished for run in self._runs), "all micro-batches to end")
        for issued in (*self.stages.streams, self.stages.side):
            if issued.stream is not None:
                torch.cuda.current_stream(issued.device).wait_stream(issued.stream)
        self._runs = []
        self.schedule.reset()

    def remove(self) -> None:
        """Take the hooks off and end micro-batches that still wait. Safe to call twice."""
        if self._owner.is_here and any(not run.finished for run in self._runs):
            self.schedule.fail(WanshimError("the pipeline was removed with micro-batches in flight"))
        self._undo.remove()

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        with suppress(Abandoned):
            self.schedule.wait_until(holds, what)
            return
        for run in self._runs:
            run.end(END_SECONDS)
        assert self.schedule.error is not None
        raise self.schedule.error  # outside the handler: it keeps its own cause and context

    def _loss_of(self, run: MicroBatchRun) -> torch.Tensor:
        if run.loss is None:
            self._wait(lambda: run.loss is not None, f"the loss of micro-batch {run.number}")
        assert run.loss is not None
        if run.loss_ready is not None:
            here = torch.cuda.current_stream(run.loss.device)
            here.wait_event(run.loss_ready)
            run.loss.record_stream(here)
        return run.loss

    # --- hooks

    def _before(self, stage: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = current()
        if backward_runs():
            return self._replay(stage, args), {name: self._replay(stage, [v])[0] for name, v in kwargs.items()}
        return None if run is None or run.stages is not self.stages else run.receive(stage, args, kwargs)

    def _replay(self, stage: int, values: Iterable[Any]) -> tuple[Any, ...]:
        """A block run again by its checkpoint gets what it got the first time."""
        result = []
        for value in values:
            if isinstance(value, tuple):
                value = self._replay(stage, value) if not hasattr(value, "_fields") else value
            elif isinstance(value, torch.Tensor):
                known = self.stages.known(stage, value)
                value = value if known is None else known
            result.append(value)
        return tuple(result)

    def _after(self, stage: int, last: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        run = current()
        if run is None or run.stages is not self.stages or backward_runs():
            return None
        return run.leave(stage, output, last)
