"""A cut of autograd's graph in two, so that each half can have its backward by itself.

Neither half holds the value at the cut: what the blocks beside it saved may leave the device while nobody works on it,
as checkpoint offload has it.
"""

from __future__ import annotations

from typing import Any

import torch


class GraphCut:
    """Between `output`, where a graph ends, and `begin`, the same value where the next one begins."""

    def __init__(self, output: torch.Tensor) -> None:
        self.gradient: torch.Tensor | None = None  # of the value, between the backwards of both graphs
        self._end = _End.apply(output, self) if output.requires_grad else None  # type: ignore[no-untyped-call]

    def begin(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, detached and maybe on another device, as the next graph gets it. Called on the stream on which that
        graph computes."""
        if self._end is None:
            return value
        anchor = torch.empty((), device=value.device, requires_grad=True)  # or autograd would not follow
        return _Begin.apply(anchor, value, self)  # type: ignore[no-any-return, no-untyped-call]

    def backward(self, leaves: list[torch.Tensor], due: list[torch.Tensor]) -> bool:
        """Backward of the graph that ends here, from `gradient`. `due` comes first in the gradients of these leaves.

        Returns:
            Whether there was anything to do.
        """
        if self.gradient is None or self._end is None:
            return False
        torch.autograd.backward([self._end, *leaves], [torch.zeros_like(self._end), *due])
        return True


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, cut: GraphCut) -> torch.Tensor:
        ctx.cut = cut
        return output.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        gradient, ctx.cut.gradient = ctx.cut.gradient, None
        return gradient, None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, cut: GraphCut) -> torch.Tensor:
        ctx.cut = cut
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        (ctx.cut.gradient,) = gradients
        return None, None, None
