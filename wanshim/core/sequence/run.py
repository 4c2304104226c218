"""State that the hooks of all blocks share: the group, the plan for each length, and what a call leaves to check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from wanshim.core.shared.digest import digest

from .attendance import Attendance
from .exchange import Shard, Share, shard
from .gradients import GradientAverage
from .group import SequenceGroup
from .inputs import FiniteCheck, InputCheck, LossCheck
from .plan import SequencePlan


class ShardedModel:
    """One sharded model on this rank.

    Args:
        attendance: what tells a call that one rank makes alone, and computes whole, from one of all ranks. None: all
            ranks make every call.
        late: as of `Passage`.
    """

    def __init__(
        self,
        group: SequenceGroup,
        plan: SequencePlan,
        *,
        sum_gradients: bool,
        check_finite: bool,
        attendance: Attendance | None = None,
        late: float | None = None,
    ) -> None:
        self.group, self.attendance, self.late = group, attendance, late
        self.alone = False
        self.heads: list[tuple[nn.Module, str, int, int]] = []  # where a module holds how many: this rank's, and all
        self._inside = False
        self.exchange: Callable[..., Any] | None = None  # of the block that runs, if it attends by a function
        self.plan = plan
        self.gradients = GradientAverage(group, self.begin_backward) if sum_gradients else None
        self.check_finite = check_finite
        self.trained: list[nn.Module] = []  # whose parameters have the same gradients on all ranks
        self._plans: dict[int, SequencePlan] = {}
        self._calls = 0
        self._arriving: list[InputCheck] = []
        self._checks: list[InputCheck | FiniteCheck | LossCheck] = []
        self._brought: dict[tuple[int, int | None], tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._in_backward = False
        self.loss: torch.Tensor | None = None  # of the backward that comes next, to be compared over the ranks

    def plan_for(self, tokens: int) -> SequencePlan:
        if tokens not in self._plans:
            self._plans[tokens] = self.plan.with_tokens(tokens)
        return self._plans[tokens]

    def decide(self, inputs: Mapping[str, torch.Tensor], *, first: bool) -> bool:
        """Whether this rank computes alone the call that begins, with the whole model.

        Args:
            first: of the lists of blocks in the model; a later one follows it within a call.
        """
        if self.attendance is None or (self._inside and not first):
            return self.alone
        self._inside = True
        # a reentrant checkpoint runs its first forward without gradients, on inputs that want them
        if torch.is_grad_enabled() or any(t.requires_grad for t in inputs.values()):
            self.attendance.join("the model, with gradients")
            self._compute(alone=False)
        else:
            digests = (f"{name} {digest(t)}" for name, t in inputs.items())
            self._compute(alone=not self.attendance.together(f"the model: {', '.join(digests)}"))
        return self.alone

    def leave(self) -> None:
        """A call is over, or has failed in a block."""
        self._inside = False
        self._compute(alone=False)

    def _compute(self, *, alone: bool) -> None:
        if alone != self.alone:
            self.alone = alone
            for module, name, mine, whole in self.heads:
                setattr(module, name, whole if alone else mine)

    def enter(self, inputs: Mapping[str, torch.Tensor], plan: SequencePlan) -> None:
        """The first block of a list is called, not recomputed."""
        if self._in_backward:
            self.group.watch.fail("error", "a backward pass ended with an error, and a forward pass followed")
            raise self.group.watch.cause()
        self.plan = plan
        self._calls += 1
        described = ", ".join(_described(name, t) for name, t in inputs.items())
        described += "" if torch.is_grad_enabled() else ", without gradients"
        self.group.watch.called(self._calls, described)
        if self.gradients is not None:  # also without gradients: a reentrant checkpoint runs its first forward so
            self.gradients.watch(named for module in self.trained for named in module.named_parameters())
        self._arriving.append(InputCheck(self.group, self._calls, inputs, described))
        if not next(iter(inputs.values())).is_cuda:  # nothing runs ahead, and gloo ends a process on a wrong size
            self.arrive()
            self._checks[-1].verify()

    def arrive(self) -> None:
        """The first block is on its way: by now the digests are, too."""
        while self._arriving:
            check = self._arriving.pop()
            check.arrive()
            self._checks.append(check)

    def local(self, x: torch.Tensor, dim: int, plan: SequencePlan) -> torch.Tensor:
        """This rank's part of a tensor with an entry a token."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return shard(x, dim, self.group, plan.tokens)
        return self._once(x, dim, lambda: Shard.apply(x, dim, self.group, plan.tokens))

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that this rank uses whole."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return self._once(x, None, lambda: Share.apply(x, self.group))

    def gathered(self, x: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
        """Behind the last block: the tokens of all ranks."""
        self.leave()
        self._brought.clear()
        self.group.watch.at("gather of the tokens")
        whole = _Gather.apply(x, self, plan) if x.dim() == 3 else _Gather.apply(x[None], self, plan)[0]
        if not torch.is_grad_enabled():
            self.verify()
        return whole

    def begin_backward(self) -> None:
        """Once a backward pass: its end is where gradients become whole and checks are read."""
        self.group.check_open()
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            loss, self.loss = self.loss, None
            if loss is not None:
                self.group.watch.at("comparison of the loss")
                self._checks.append(LossCheck(self.group, loss))

    def verify(self) -> None:
        checks, self._checks = self._checks, []
        for check in checks:
            check.verify()
        self.group.watch.check()

    def add_check(self, check: FiniteCheck) -> None:
        self._checks.append(check)

    def check(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
            self.group.poll(event.query)
        self.verify()

    def close(self) -> None:
        if self.gradients is not None:
            self.gradients.remove()
        self._brought.clear()
        self.group.close()

    def _end_backward(self) -> None:
        self.verify()
        if self.gradients is not None:
            self.gradients.finish()
        self._in_backward = False
        self.group.watch.at("outside the blocks")

    def _once(self, x: torch.Tensor, dim: int | None, make: Any) -> torch.Tensor:
        """The same result for every block of a call, so that its gradients meet before they travel."""
        if backward_runs():  # a recomputation: its graph is its own
            return make()
        known = self._brought.get((id(x), dim))
        if known is None or known[1] != x._version:
            known = self._brought[id(x), dim] = (x, x._version, make())
        return known[2]


def _described(name: str, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {dtype} {list(tensor.shape)}{' with a gradient' * tensor.requires_grad}"


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: ShardedModel, plan: SequencePlan) -> torch.Tensor:
        ctx.run, ctx.plan = run, plan
        batch, _, width = x.shape
        out = x.new_empty_strided((batch, sum(plan.tokens), width), (width, batch * width, 1))
        run.group.gather(x.transpose(0, 1).contiguous(), plan.tokens, out.transpose(0, 1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        run = ctx.run
        run.begin_backward()
        if run.check_finite:
            run.add_check(FiniteCheck(run.group, gradient))
        mine = shard(gradient, 1, run.group, ctx.plan.tokens)
        # times the ranks, over which the blocks' gradients are averaged; a view would keep that of all tokens alive
        return mine * run.group.size, None, None


def backward_runs() -> bool:
    """Whether autograd is at work: a block that is called now is recomputed from its checkpoint."""
    return torch._C._current_graph_task_id() != -1
