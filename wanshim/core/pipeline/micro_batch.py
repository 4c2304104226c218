"""One micro-batch on its way through the stages.

The framework's forward runs whole and unmodified in a thread of its own. Hooks on the blocks cut autograd's
graph behind every block and move thread and activation from stage to stage; backward later walks the cuts
from the last to the first, each stage in its turn. So no call of the autograd engine, which has one thread a
device for all, ever spans more than one block, and each device is fed by the micro-batch whose turn it is.
"""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from wanshim.core.pipeline.graph_cut import GraphCut, reads_inside
from wanshim.core.pipeline.schedule import Abandoned, Schedule, Unit
from wanshim.core.pipeline.stages import PROLOGUE, Stages
from wanshim.core.shared.autocast import autocast_of_caller
from wanshim.errors import WanshimError

_thread = threading.local()


def current() -> MicroBatchRun | None:
    """The micro-batch whose forward this thread runs."""
    return getattr(_thread, "run", None)


def in_pipeline() -> bool:
    """Whether this thread runs the forward of a pipelined micro-batch."""
    return current() is not None


def _end_frames(error: BaseException) -> None:
    """Let go of what the failed frames hold, in the thread that ran them.

    Before torch 2.15 a checkpoint that failed takes its saved-tensor hooks off only when its frame dies, from
    whichever thread that happens in: the caller's, who holds the error, or another micro-batch's.
    """
    ended: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in ended:
            ended.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]


@dataclass
class Received:
    """A tensor of the prologue (`source`), and the leaf that it is on a stage."""

    source: torch.Tensor
    leaf: torch.Tensor


class MicroBatchRun:
    """A micro-batch: `forward()` gives its loss; `start_backward(loss)` begins the framework's own backward.

    Args:
        weights: ids of the blocks' parameters.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        number: int,
        forward: Callable[[], torch.Tensor],
        weights: Container[int],
    ) -> None:
        self.stages = stages
        self.schedule = schedule
        self.number = number
        self.stage = PROLOGUE
        self.entered = False  # the prologue is over
        self.asked = False  # the caller wants its backward
        self.finished = False
        self.loss: torch.Tensor | None = None
        self.loss_ready: Any = None
        self.start_backward: Callable[[torch.Tensor], object] | None = None
        self._forward: Callable[[], torch.Tensor] | None = forward
        self._weights = weights
        self._cut_every_block = True
        self._cuts: list[list[GraphCut]] = [[] for _ in stages.streams]
        # of each stage: what came from the prologue, in order of arrival
        self._received: list[list[Received]] = [[] for _ in stages.streams]
        self._submitted = stages.mark_of_caller()
        context, autocast = contextvars.copy_context(), autocast_of_caller()
        name = f"wanshim micro-batch {number}"
        self._thread = threading.Thread(target=lambda: context.run(self._run, autocast), name=name, daemon=True)

    def start(self) -> None:
        self.schedule.enroll(self._thread)
        self._thread.start()

    def end(self, seconds: float) -> None:
        """Wait for its thread, but no longer than that."""
        if self._thread.ident is not None:  # it began
            self._thread.join(seconds)

    def _run(self, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        try:
            with autocast():
                self._work()
        except BaseException as error:
            try:
                _end_frames(error)
            finally:
                if not isinstance(error, Abandoned):
                    self.schedule.fail(error)
        finally:
            self._forward = self.start_backward = None
            self._cuts, self._received = [], []
            self.finished = True
            self.schedule.retire(self._thread)

    def _work(self) -> None:
        stages, schedule = self.stages, self.schedule
        stages.side.enter()
        stages.side.wait(self._submitted)
        assert self._forward is not None
        _thread.run = self
        try:
            loss = self._forward()
        finally:
            _thread.run = None
        if self.stage != len(stages.streams):
            raise WanshimError(
                f"the forward of micro-batch {self.number} ended in stage {self.stage} of {len(stages.streams)}",
                expected="every forward to call all blocks once, in order",
                topic="pipeline_off",
            )
        if reads_inside(loss, self._cuts[-1][-1], self._weights):
            raise WanshimError(
                f"the loss of micro-batch {self.number} depends on what a block computes, and not by the last one's "
                "output",
                expected="a loss that depends on the blocks by the output of the last one alone",
                topic="pipeline_off",
            )
        self.loss_ready, self.loss = stages.side.mark(), loss.detach()
        schedule.notify()
        schedule.wait_until(lambda: self.asked, f"the backward of micro-batch {self.number} to be asked for")
        assert self.start_backward is not None
        self.start_backward(loss)
        del loss
        self._note(False, "tail", self.stage)
        self._backward()

    # --- forward, called by the hooks

    def receive(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a block as it gets them: what the prologue made is brought over, once a stage."""
        activation: int | None = 0
        if self.stage == PROLOGUE and stage == 0:
            self._begin(args, kwargs)
            activation = None
        elif self.stage != stage:
            raise WanshimError(
                f"micro-batch {self.number} called a block of stage {stage} while in stage {self.stage}",
                expected="every forward to call all blocks once, in order",
                topic="pipeline_off",
            )
        new_args = tuple(arg if i == activation else self._bring(stage, arg) for i, arg in enumerate(args))
        return new_args, {name: self._bring(stage, value) for name, value in kwargs.items()}

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """From the prologue to the first stage."""
        # A gradient that several blocks add to is added up in the same order as unsplit only if autograd
        # itself walks those blocks in one go.
        shared = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.Tensor)]
        self._cut_every_block = not any(value.requires_grad for value in shared)
        made = self.stages.side.mark()
        self.entered = True
        self.schedule.notify()
        self._move_to(0, made)

    def _move_to(self, stage: int, ready: Any) -> None:
        stream = self.stages.stream_of(stage)
        if stage < len(self.stages.streams):
            self.schedule.take(Unit.FORWARD, stage, self.number)
        self.stage = stage
        self.schedule.notify()
        stream.enter()
        stream.wait(ready)
        self._note(True, "forward" if stream is not self.stages.side else "tail", stage)

    def _bring(self, stage: int, value: Any) -> Any:
        if isinstance(value, tuple):
            items = [self._bring(stage, item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        stream = self.stages.stream_of(stage)
        if not isinstance(value, torch.Tensor) or value.device.type != stream.device.type:
            return value
        known = self.stages.known(stage, value)
        if known is not None:
            return known
        arrived, ready = self.stages.link(PROLOGUE, stage).copy(value)
        stream.wait(ready)
        leaf = arrived.requires_grad_(value.requires_grad)
        self.stages.remember(stage, value, leaf)
        self._received[stage].append(Received(value, leaf))
        return leaf

    def leave(self, stage: int, output: Any, last: bool) -> Any:
        """The output of a block, a tensor or a tuple of them, as the caller gets it; behind a stage's last block, in
        the next stage."""
        self.stages.stream_of(stage).limit_run_ahead()
        if not last and not self._cut_every_block:
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        cut = GraphCut(outputs)
        self._cuts[stage].append(cut)
        if last:
            arrived, ready = self._sent(stage, stage + 1, outputs)
            self._note(False, "forward", stage)
            self.schedule.give(Unit.FORWARD, stage)
            self._move_to(stage + 1, ready)
        else:
            arrived = [value.detach() for value in outputs]
        begun = cut.begin(arrived)
        return tuple(begun) if isinstance(output, tuple) else begun[0]

    def _sent(self, source: int, target: int, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """Tensors, or None, of one stage in another, and the event from which on all of them may be read there: copies
        follow one another."""
        ready, arrived = None, []
        for value in values:
            if value is not None:
                value, ready = self.stages.link(source, target).copy(value)
            arrived.append(value)
        return arrived, ready

    def _note(self, begin: bool, what: str, stage: int) -> None:
        if self.stages.trace is not None:
            self.stages.trace(begin, what, stage, self.number, self.stages.stream_of(stage))

    # --- backward

    def _backward(self) -> None:
        schedule, num_stages = self.schedule, len(self.stages.streams)
        owed: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}  # gradients of what the prologue made, and where
        for stage in reversed(range(num_stages)):
            arrived, ready = self._sent(stage + 1, stage, self._cuts[stage][-1].gradients)
            schedule.take(Unit.BACKWARD, stage, self.number)
            self.stages.stream_of(stage).enter()
            self.stages.stream_of(stage).wait(ready)
            self._note(True, "backward", stage)
            self._backward_of_stage(stage, arrived, owed)
            self._note(False, "backward", stage)
            if stage == 0:
                self._backward_of_prologue(owed)
            schedule.give(Unit.BACKWARD, stage)

    def _backward_of_stage(
        self, stage: int, gradients: list[Any], owed: dict[torch.Tensor, tuple[int, torch.Tensor]]
    ) -> None:
        stream, cuts = self.stages.stream_of(stage), self._cuts[stage]
        leaves, due = self._due_here(stage, owed)
        cuts[-1].gradients = gradients
        while cuts:
            if cuts.pop().backward(leaves, due):
                leaves, due = [], []
            stream.limit_run_ahead()
        for leaf, gradient_due in zip(leaves, due, strict=True):  # nothing here depends on it: it goes on as it is
            leaf.grad = gradient_due
        for one in self._received[stage]:
            if one.leaf.grad is not None:
                owed[one.source] = (stage, one.leaf.grad)
                one.leaf.grad = None

    def _due_here(
        self, stage: int, owed: dict[torch.Tensor, tuple[int, torch.Tensor]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gradients from later stages for what this stage got from the prologue too: they come first in the sum."""
        leaves, due = [], []
        for one in self._received[stage]:
            if one.source in owed:
                source, gradient = owed.pop(one.source)
                arrived, ready = self.stages.link(source, stage).copy(gradient)
                self.stages.stream_of(stage).wait(ready)
                leaves.append(one.leaf)
                due.append(arrived)
        return leaves, due

    def _backward_of_prologue(self, owed: dict[torch.Tensor, tuple[int, torch.Tensor]]) -> None:
        sources, gradients = [], []
        for source, (stage, gradient) in owed.items():
            arrived, ready = self.stages.link(stage, PROLOGUE).copy(gradient)
            self.stages.side.wait(ready)
            sources.append(source)
            gradients.append(arrived)
        if sources:
            self.stages.side.enter()
            torch.autograd.backward(sources, gradients)
