"""Linears whose frozen weight is multiplied in eight bits, in forward and for the gradient of what they get.

Each row of the activation (a token) and each row of the weight (an output channel) has a scale of its own, as in
LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339); float8 is e4m3 (Micikevicius et al. 2022, arXiv:2209.05433). The
gradient's product sums over output channels, so the weight's scales go into the gradient before it is quantised, and
one quantised weight serves both products. There is no third product: the weight is frozen. Each product's derivative
is the other product, so gradients of gradients are computed the same way.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wanshim.core.eight_bit.product import FORMATS, MULTIPLE, Format, quantize_rows
from wanshim.errors import PlacementInvalid
from wanshim.undo import Undo

NARROW = 8  # of a product this much narrower than long, the quantisation takes more than eight bits save


@dataclass(frozen=True)
class EightBitCount:
    """Counts of Linears: those that multiply in eight bits, and those that stay as they are."""

    changed: int
    left: int


class _EightBitLinear(nn.Linear):
    """The class of a Linear while it multiplies in eight bits: shared by all blocks, so that they stay one graph."""

    format: ClassVar[Format]

    def __reduce_ex__(self, version: Any) -> Any:
        """For copies and files, which hold a plain Linear."""
        return copyreg._reconstructor, (nn.Linear, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _trains(self.weight):  # since then
            return super().forward(input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        weight, scales = self.weight, None
        if hasattr(weight, "qdata"):
            weight, scales = weight.qdata, weight.scale
        rows = _Product.apply(input.reshape(-1, self.in_features), weight, scales, self.format, dtype, False)
        if self.bias is not None:
            rows = rows + self.bias.to(dtype)
        return rows.reshape(*input.shape[:-1], self.out_features)  # type: ignore[no-any-return]


class _Float8Linear(_EightBitLinear):
    format = FORMATS["float8"]


class _Int8Linear(_EightBitLinear):
    format = FORMATS["int8"]


CLASSES = {"float8": _Float8Linear, "int8": _Int8Linear}


def compute_in_eight_bits(modules: Iterable[nn.Module], name: str, undo: Undo) -> EightBitCount:
    """Until `undo` is removed, Linears with a frozen weight multiply in eight bits.

    A weight that torchao stores in the same format, with a scale a row, is used as it is. Any other is quantised in
    each call, which takes about a hundredth of the product's time and no memory that lasts, so that weights may move
    between calls. Linears that train, narrow ones such as LoRA's, those whose sizes are no multiples of 16, and those
    stored in another format stay as they are. Biases are added in the activation's dtype. Without gradients, as in
    generation, every weight is frozen.

    Args:
        name: of a format: `float8` or `int8`.

    Raises:
        PlacementInvalid: no Linear can be changed.
    """
    linears = [m for module in modules for m in module.modules() if isinstance(m, nn.Linear)]
    changed = [linear for linear in linears if _takes(linear, FORMATS[name])]
    if not changed:
        raise PlacementInvalid(
            f"no frozen Linear that could multiply in {name}",
            expected=f"a frozen base in bfloat16, float16, float32 or {name}, sizes that are multiples of {MULTIPLE}, "
            "and LoRA on top",
            topic="compute_off",
        )
    for linear in changed:
        linear.__class__ = CLASSES[name]
        undo.add(partial(setattr, linear, "__class__", nn.Linear))
    return EightBitCount(changed=len(changed), left=len(linears) - len(changed))


def takes_eight_bits(modules: Iterable[nn.Module], name: str) -> bool:
    """Whether `compute_in_eight_bits` finds a Linear in these modules."""
    linears = (m for module in modules for m in module.modules() if isinstance(m, nn.Linear))
    return any(_takes(linear, FORMATS[name]) for linear in linears)


def _takes(linear: nn.Linear, format: Format) -> bool:
    weight = linear.weight
    if type(linear) is not nn.Linear or _trains(weight) or any(size % MULTIPLE for size in weight.shape):
        return False
    if NARROW * min(weight.shape) < max(weight.shape):
        return False
    if not is_traceable_wrapper_subclass(weight):
        return weight.dtype.is_floating_point and weight.dtype.itemsize > 1
    stored = getattr(weight, "qdata", None)
    return stored is not None and stored.dtype == format.dtype and weight.scale.shape == (weight.size(0), 1)


def _trains(weight: torch.Tensor) -> bool:
    return weight.requires_grad and torch.is_grad_enabled()


class _Product(torch.autograd.Function):
    """The product of rows with a weight's rows, or with its columns: each is what the other passes back. `scales` are
    the weight's if it is in eight bits already."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, format: Format,
        dtype: torch.dtype, with_columns: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(weight, scales)
        ctx.format, ctx.dtype, ctx.with_columns = format, x.dtype, with_columns
        b, scales = (weight, scales) if scales is not None else quantize_rows(weight, format)
        if not with_columns:
            a, scale = quantize_rows(x, format)
            return format.multiply(a, b.t(), scale, scales.t(), dtype)
        a, scale = quantize_rows(x, format, scales.t())
        by_column = b.t().contiguous().t()  # float8's kernels read along the sum
        ones = scales.new_ones((1, weight.size(1)))
        return format.multiply(a, by_column, scale, ones, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, scales = ctx.saved_tensors
        passed = _Product.apply(gradient, weight, scales, ctx.format, ctx.dtype, not ctx.with_columns)
        return passed, None, None, None, None, None
