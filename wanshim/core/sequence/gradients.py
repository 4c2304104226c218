"""The gradients of all that is trained, averaged over the ranks while backward goes on.

What reaches a block's parameter through the block is the gradient of this rank's tokens, times the number of ranks
(`run.py`); what reaches it or another parameter otherwise, as from a loss term on the weights, is whole on every rank.
The average of the ranks is the whole of both. Without it parameters outside of the blocks would drift apart: some
backwards, as that of attention, round differently in each run.

What one backward adds is kept apart from what earlier ones left in `.grad`, averaged in buckets in the order in which
it comes, the same on every rank, and added at the end: accumulated gradients are never averaged twice. Half-precision
gradients are summed in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on average the gradients of these parameters; those watched already are passed over."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = [
                    parameter.register_hook(self._setting_apart(parameter)),
                    parameter.register_post_accumulate_grad_hook(self._take),
                ]

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
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def remove(self) -> None:
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()

    def _setting_apart(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def set_apart(_: torch.Tensor) -> None:
            self._begin()
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
