"""A cut of autograd's graph in two, so that each half can have its backward by itself.

Neither half holds the values at the cut: what the blocks beside it saved may leave the device while nobody works on it,
as checkpoint offload has it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch


class GraphCut:
    """Between `outputs`, where a graph ends, and `begin`, the same values where the next one begins."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        # of the values, between the backwards of both graphs
        self.gradients: list[torch.Tensor | None] = [None] * len(outputs)
        tracked = any(output.requires_grad for output in outputs)
        self._end = _End.apply(self, *outputs) if tracked else None  # type: ignore[no-untyped-call]

    def begin(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`values`, detached and maybe on another device, as the next graph gets them. Called on the stream on which
        that graph computes."""
        if self._end is None:
            return list(values)
        anchor = torch.empty((), device=values[0].device, requires_grad=True)  # or autograd would not follow
        return [_Begin.apply(anchor, value, self, i) for i, value in enumerate(values)]  # type: ignore[no-untyped-call]

    def backward(self, leaves: list[torch.Tensor], due: list[torch.Tensor]) -> bool:
        """Backward of the graph that ends here, from `gradients`. `due` comes first in the gradients of these leaves.

        Returns:
            Whether there was anything to do.
        """
        if self._end is None or all(gradient is None for gradient in self.gradients):
            return False
        torch.autograd.backward([self._end, *leaves], [torch.zeros_like(self._end), *due])
        return True


def reads_inside(loss: torch.Tensor, cut: GraphCut, weights: Container[int]) -> bool:
    """Whether the graph of `loss` goes on where `cut` ends it, so that its backward would come to blocks by the way.

    Args:
        weights: ids of the parameters of what is cut.
    """
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in weights:
            return True
        if not isinstance(node, _Begin._backward_cls):
            nodes += [before for before, _ in node.next_functions]
        elif node.cut is not cut:
            return True
    return False


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: GraphCut, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.cut = cut
        return outputs[0].new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.cut.gradients = ctx.cut.gradients, [None] * len(ctx.cut.gradients)
        return None, *gradients


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, cut: GraphCut, number: int) -> torch.Tensor:
        ctx.cut, ctx.number = cut, number
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        (ctx.cut.gradients[ctx.number],) = gradients
        return None, None, None, None
