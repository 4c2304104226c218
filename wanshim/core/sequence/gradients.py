"""The gradients of all that is trained, averaged over the ranks while backward goes on.

What reaches a block's parameter through the block is the gradient of this rank's tokens, times the number of ranks
(`run.py`); what reaches it or another parameter otherwise, as from a loss term on the weights, is whole on every rank.
The average of the ranks is the whole of both. Without it parameters outside of the blocks would drift apart: some
backwards, as that of attention, round differently in each run.

What one backward adds is kept apart from what earlier ones left in `.grad`, averaged in buckets in the order in which
it comes, the same on every rank, and added at the end: accumulated gradients are never averaged twice. Half-precision
gradients are summed in float32. A user's hook on a parameter, as one that clips or steps an optimizer, runs there too,
on the whole gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from wanshim.errors import ModelInvalid

from .group import InFlight, SequenceGroup

BUCKET_BYTES = 32 * 2**20
_BUCKETS_IN_FLIGHT = 2


@dataclass
class _Bucket:
    parameters: list[torch.Tensor]
    flat: torch.Tensor
    dtype: torch.dtype
    pending: InFlight


class _Deferred:
    """A user's hook on a parameter, in its place: autograd calls it with a part, and `finish()` with the whole."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, part: torch.Tensor) -> None:
        """Does nothing."""


_Hooks = dict[int, Callable[..., Any]]  # by the numbers of their handles


def _hooks_of(parameter: torch.Tensor) -> tuple[_Hooks, _Hooks]:
    """The hooks on a parameter's gradient, and those behind its accumulation."""
    return parameter._backward_hooks or {}, getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def _deferred(hooks: _Hooks) -> _Hooks:
    return {number: hook.hook for number, hook in hooks.items() if isinstance(hook, _Deferred)}


def refuse_hooks(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse hooks on trained parameters, by name, before a backward after which DDP makes whole gradients.

    Raises:
        ModelInvalid: a parameter has one.
    """
    for name, parameter in parameters:
        if parameter.requires_grad and any(_hooks_of(parameter)):
            raise _hook_on_a_part(name, "no hooks on parameters of several groups, whose gradients DDP averages later")


def _hook_on_a_part(name: str, expected: str) -> ModelInvalid:
    return ModelInvalid(f"a hook on {name} that would see this rank's part of its gradient", expected=expected)


class GradientAverage:
    """Averages what each backward gives the watched parameters, from its first gradient to `finish()`.

    Args:
        begin: called with the first gradient; it sees to it that `finish()` is called at the end of that backward.
    """

    def __init__(self, group: SequenceGroup, begin: Callable[[], None], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._group, self._begin, self._bucket_bytes = group, begin, bucket_bytes
        self._bytes: Counter[torch.dtype] = Counter()
        self._hooks: dict[torch.Tensor, list[torch.utils.hooks.RemovableHandle]] = {}
        self._earlier: dict[torch.Tensor, torch.Tensor | None] = {}
        self._waiting: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._in_flight: list[_Bucket] = []
        self._averaged: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """From now on average the gradients of these parameters, which have names, and run the hooks that they have by
        now on the whole ones; the gradients of those watched already are averaged once."""
        for name, parameter in parameters:
            if not parameter.requires_grad:
                continue
            for hooks, number, hook in self._undeferred(parameter):
                hooks[number] = _Deferred(hook)
            if parameter not in self._hooks:
                self._hooks[parameter] = [
                    parameter.register_hook(self._setting_apart(name, parameter)),
                    parameter.register_post_accumulate_grad_hook(self._take),
                ]

    @torch.no_grad()
    def finish(self) -> None:
        """Give every parameter its whole gradient: called when a backward has passed all of them."""
        for dtype in list(self._waiting):
            self._send(dtype)
        while self._in_flight:
            self._land()
        earlier, self._earlier = self._earlier, {}
        averaged, self._averaged = self._averaged, []
        for parameter, gradient in earlier.items():
            parameter.grad = gradient
        missing = len(earlier.keys() - {parameter for parameter, _ in averaged})
        if missing:
            raise ModelInvalid(
                f"torch.autograd.grad computed this rank's part of {missing} gradients",
                expected="loss.backward(), which leaves whole gradients in .grad",
            )
        for parameter, gradient in averaged:
            on_gradient, on_accumulation = _hooks_of(parameter)
            for hook in _deferred(on_gradient).values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
            for hook in _deferred(on_accumulation).values():
                hook(parameter)

    def remove(self) -> None:
        for parameter, own in self._hooks.items():
            for handle in own:
                handle.remove()
            for hooks in _hooks_of(parameter):
                hooks.update(_deferred(hooks))
        self._hooks.clear()

    def _undeferred(self, parameter: torch.Tensor) -> list[tuple[_Hooks, int, Callable[..., Any]]]:
        """The user's hooks that autograd would call with a part of the gradient."""
        own = {handle.id for handle in self._hooks.get(parameter, ())}
        return [
            (hooks, number, hook)
            for hooks in _hooks_of(parameter)
            for number, hook in hooks.items()
            if number not in own and not isinstance(hook, _Deferred)
        ]

    def _setting_apart(self, name: str, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def set_apart(_: torch.Tensor) -> None:
            self._begin()
            if self._undeferred(parameter):
                raise _hook_on_a_part(name, "hooks on parameters before the forward pass: they see the whole gradient")
            if parameter not in self._earlier:
                self._earlier[parameter] = parameter.grad
                parameter.grad = None

        return set_apart

    def _take(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # behind an operation that hands none back: on every rank, or none
            parameter.grad = self._earlier.pop(parameter)
            return
        self._waiting.setdefault(gradient.dtype, []).append((parameter, gradient))
        self._bytes[gradient.dtype] += gradient.nbytes
        if self._bytes[gradient.dtype] >= self._bucket_bytes:
            self._send(gradient.dtype)

    def _send(self, dtype: torch.dtype) -> None:
        waiting = self._waiting.pop(dtype)
        del self._bytes[dtype]
        self._group.watch.at("sum of gradients")
        flat = torch.cat([gradient.reshape(-1) for _, gradient in waiting])
        flat = flat.to(torch.promote_types(dtype, torch.float32))
        self._in_flight.append(_Bucket([p for p, _ in waiting], flat, dtype, self._group.sum(flat)))
        if len(self._in_flight) > _BUCKETS_IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        bucket = self._in_flight.pop(0)
        bucket.pending.wait()
        flat = bucket.flat.div_(self._group.size).to(bucket.dtype)
        pieces = flat.split([parameter.numel() for parameter in bucket.parameters])
        self._averaged += [(p, piece.view_as(p)) for p, piece in zip(bucket.parameters, pieces, strict=True)]
