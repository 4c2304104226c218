"""Lanes: micro-batches that follow each other through the stages of a split model.

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
from torch.utils.weak import WeakTensorKeyDictionary

from wanshim.core.model_split.split import SplitHandle
from wanshim.core.pipeline.micro_batch import PROLOGUE, Lane, current
from wanshim.core.pipeline.pending_loss import PendingLoss
from wanshim.core.pipeline.schedule import Abandoned, Schedule
from wanshim.core.pipeline.stages import Link, Place
from wanshim.core.pipeline.timeline import Trace
from wanshim.core.shared.forks import Owner
from wanshim.errors import LaneInvalid
from wanshim.undo import Undo, undo_all

LAST_WORDS_S = 30.0  # how long the other lanes may take to notice that one failed


def refusal(model: nn.Module) -> str | None:
    """Why micro-batches of this model cannot overlap, or None.

    Checkpointing replays a block's random draws by setting the generator of the whole process back, which
    two lanes cannot do at the same time.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name} drops out at random (p={module.p}), and the order of draws would depend on timing"
    return None


class Lanes:
    """Pipelined micro-batches over a split. Attached until `remove()`.

    In flight are never more micro-batches than stages. Losses and gradients are those of one micro-batch
    after the other, bit for bit: each parameter's gradient is added up in the order of submission.
    Compute of a stage runs on the default stream of its device; what comes before the first block and after
    the last one runs on a stream of its own on the home device.
    Where modules before the blocks train, whatever they feed besides the blocks must be an exit of the split.
    Checkpointing inside the blocks must not preserve the random state (`preserve_rng_state=False`).
    """

    def __init__(self, handle: SplitHandle) -> None:
        plan = handle.plan
        self._owner = Owner("a pipeline")
        self.stages = [Place(torch.device(device)) for device in plan.devices]
        self.side = Place(torch.device(plan.home), own_stream=True)
        self.schedule = Schedule(len(self.stages))
        self.trace: Trace | None = None
        self._links: dict[tuple[int, int], Link] = {}
        self._known = [WeakTensorKeyDictionary() for _ in self.stages]
        self._lanes: list[Lane] = []
        self._undo: Undo = []
        for i, (stage, modules) in enumerate(handle.units):
            last = i + 1 == len(handle.units) or handle.units[i + 1][0] != stage
            for module in modules:
                before, after = partial(self._before, stage), partial(self._after, stage, last)
                self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
                self._undo.append(module.register_forward_hook(after, prepend=True).remove)

    # --- for the training loop

    @property
    def pending(self) -> int:
        """Micro-batches submitted since the last join."""
        return len(self._lanes)

    def submit(self, forward: Callable[[], torch.Tensor], inputs: Any = None) -> PendingLoss:
        """Start a micro-batch.

        Returns when everything before the first block has run, so random draws keep their order.

        Args:
            forward: computes the scalar loss; runs in a thread of its own.
            inputs: what it reads; tensors in it are kept from reuse while the lane reads them.

        Raises:
            Exception: what this or an earlier micro-batch raised.
        """
        self._owner.check()
        self._wait(lambda: not self._lanes or self._lanes[-1].stage > PROLOGUE)  # one at most waits for its turn
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor) and tensor.device == self.side.device and self.side.stream is not None:
                tensor.record_stream(self.side.stream)
        lane = Lane(self, len(self._lanes), forward)
        self._lanes.append(lane)
        lane.start()
        self._wait(lambda: lane.entered or lane.finished)
        return PendingLoss(partial(self._loss_of, lane))

    def backward(self, loss: PendingLoss, start: Callable[[torch.Tensor], object]) -> None:
        """Begin a micro-batch's backward when its loss is there; returns at once.

        Args:
            start: the caller's own way to begin it, called with the real loss in the lane's thread.
        """
        self._owner.check()
        lane = loss._value.args[0]  # type: ignore[attr-defined]
        lane.start_backward, lane.asked = start, True
        self.schedule.notify()

    def join(self) -> None:
        """Wait until all of it has been issued; what the caller issues next comes after it on every device.

        Raises:
            Exception: what a micro-batch raised.
        """
        self._owner.check()
        idle = [lane.number for lane in self._lanes if not lane.asked and not lane.finished]
        if idle:
            error = LaneInvalid(f"no backward was asked for micro-batches {idle}", expected="one for each loss")
            self.schedule.fail(error)
        self.schedule.close(len(self._lanes))
        self._wait(lambda: all(lane.finished for lane in self._lanes))
        for place in (*self.stages, self.side):
            if place.stream is not None:
                torch.cuda.current_stream(place.device).wait_stream(place.stream)
        self._lanes = []
        self.schedule.reset()

    def remove(self) -> None:
        """Take the hooks off and let lanes that still wait go. Safe to call twice."""
        if self._owner.is_here and any(not lane.finished for lane in self._lanes):
            self.schedule.fail(LaneInvalid("the lanes were removed with micro-batches in flight"))
        undo_all(self._undo)

    def _wait(self, holds: Callable[[], bool]) -> None:
        with suppress(Abandoned):
            self.schedule.wait_until(holds)
            return
        for lane in self._lanes:
            lane.end(LAST_WORDS_S)
        assert self.schedule.error is not None
        raise self.schedule.error  # outside the handler: it keeps its own cause and context

    def _loss_of(self, lane: Lane) -> torch.Tensor:
        if lane.loss is None:
            self._wait(lambda: lane.loss is not None)
        assert lane.loss is not None
        if lane.loss_ready is not None:
            here = torch.cuda.current_stream(lane.loss.device)
            here.wait_event(lane.loss_ready)
            lane.loss.record_stream(here)
        return lane.loss

    # --- for the lanes

    def place(self, stage: int) -> Place:
        return self.stages[stage] if 0 <= stage < len(self.stages) else self.side

    def link(self, source: int, target: int) -> Link:
        key = (source, target)
        if key not in self._links:
            self._links[key] = Link(self.place(source), self.place(target))
        return self._links[key]

    def mark_of_caller(self) -> Any:
        """An event behind what the caller has issued on the home device."""
        return None if self.side.stream is None else torch.cuda.current_stream(self.side.device).record_event()

    def known(self, stage: int, source: torch.Tensor) -> torch.Tensor | None:
        """What a tensor of the prologue became on a stage; also when a checkpoint replays the block."""
        found = self._known[stage].get(source)
        return found[1] if found is not None and found[0] == source._version else None

    def remember(self, stage: int, source: torch.Tensor, leaf: torch.Tensor) -> None:
        self._known[stage][source] = (source._version, leaf)

    # --- hooks

    def _before(self, stage: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lane = current()
        if _in_backward():
            return self._replay(stage, args), {name: self._replay(stage, [v])[0] for name, v in kwargs.items()}
        return None if lane is None or lane.lanes is not self else lane.receive(stage, args, kwargs)

    def _replay(self, stage: int, values: Iterable[Any]) -> tuple[Any, ...]:
        """A block run again by its checkpoint gets what it got the first time."""
        result = []
        for value in values:
            if isinstance(value, tuple):
                value = self._replay(stage, value) if not hasattr(value, "_fields") else value
            elif isinstance(value, torch.Tensor):
                known = self.known(stage, value)
                value = value if known is None else known
            result.append(value)
        return tuple(result)

    def _after(self, stage: int, last: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        lane = current()
        if lane is None or lane.lanes is not self or _in_backward():
            return None
        return lane.leave(stage, output, last)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
