"""The steps of a transformer's block, each by one kernel where that has the framework's bits, else by its own steps.

A kernel proves itself on the data at hand: the call whose number, among those of one size, is a power of two computes
both ways and returns the framework's result. A kernel that fails or gives another bit is not used for that size again.
Kernels are compiled beside the first calls, which are the framework's until that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from wanshim.core.shared.fallback import cause_of
from wanshim.core.shared.kernel_compiler import COMPILER, Kernel
from wanshim.core.shared.kernel_launch import noted
from wanshim.core.shared.optional_triton import hash_ahead
from wanshim.core.shared.plain import seen_by, why_not_plain
from wanshim.core.shared.recent import Recent

from . import kernels

T = TypeVar("T")
Result = Callable[[], torch.Tensor]


@dataclass(slots=True)
class _Kernel:
    """The kernel of a step for one size.

    Args:
        awaited: what Triton compiles for it first.
        calls: how many there were.
        proven: it was compared.
        rejected: it is not used again.
    """

    awaited: Sequence[Kernel]
    calls: int = 0
    proven: bool = False
    rejected: bool = False


class StrictOperators:
    """The steps of one framework's blocks.

    Args:
        on_rejection: called with a sentence for each kernel and size that is not used again.
    """

    def __init__(self, on_rejection: Callable[[str], None]) -> None:
        self._on_rejection = on_rejection
        hash_ahead()
        self._known: Recent[tuple[Any, ...], _Kernel] = Recent()
        self._compiling: list[Kernel] = []

    def serve(self, x: torch.Tensor) -> bool:
        """Whether kernels may compute what follows from `x`: a plain tensor on a GPU, no gradient or autocast, not
        `seen_by` anything."""
        return (
            type(x) is torch.Tensor
            and kernels.available(x)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(x.device.type)
            and seen_by() is None
        )

    def normalized(self, x: torch.Tensor, norm: nn.LayerNorm, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """norm(x) * (1 + scale) + shift, computed in fp32 and rounded once.

        Args:
            x: (batch, tokens, channels).
            norm: of the channels, without weights.
            scale: fp32, (batch or 1, tokens or 1, channels), as `shift`.
        """

        def steps() -> torch.Tensor:
            return (norm(x.float()) * (1 + scale) + shift).type_as(x)

        if norm.weight is not None or why_not_plain((norm,)):
            return steps()
        kernel = partial(kernels.normalized, eps=norm.eps, affine=False)
        return self._either("norm with modulation", kernel, steps, (x, scale, shift), norm.eps)

    def affine(self, x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        """norm(x), computed in fp32 and rounded once. Args: x: (batch, tokens, channels)."""

        def steps() -> torch.Tensor:
            return norm(x.float()).type_as(x)

        if norm.weight is None or norm.bias is None or why_not_plain((norm,)):
            return steps()
        weight, bias = norm.weight.view(1, 1, -1), norm.bias.view(1, 1, -1)
        kernel = partial(kernels.normalized, eps=norm.eps, affine=True)
        return self._either("norm with weights", kernel, steps, (x, weight, bias), norm.eps)

    def gated(self, x: torch.Tensor, gate: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """x + gate * update: in fp32 and rounded once if the gate is fp32, else rounded twice to the one dtype.

        Args:
            x: (batch, tokens, channels), as `update`.
            gate: (batch or 1, tokens or 1, channels).
        """
        wide = gate.dtype == torch.float32

        def steps() -> torch.Tensor:
            return (x.float() + update.float() * gate).type_as(x) if wide else x + gate * update

        if not _alike(x, update) or not (wide or gate.dtype == x.dtype):
            return steps()
        return self._either("gate with residual", partial(kernels.gated, wide=wide), steps, (x, gate, update))

    def modulated(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """x * (1 + scale) + shift, each step rounded to the one dtype. Args: as of `normalized`."""
        return self._either("modulation", kernels.modulated, lambda: x * (1 + scale) + shift, (x, scale, shift))

    def rotated(
        self, x: torch.Tensor, angles: torch.Tensor | tuple[torch.Tensor, torch.Tensor], head: int, steps: Result
    ) -> torch.Tensor:
        """The rotary embedding of `x`.

        Args:
            x: (batch, tokens, heads * head).
            angles: cosine and sine, each with `head` values for each token in fp32 or fp64, of which those of even
                places count in the cosine, those of odd places in the sine; or `head // 2` complex numbers each.
            head: channels of a head.
            steps: the framework's own computation, whose result may have any shape.
        """
        return self._either(
            "rotary embedding", partial(kernels.rotated, head=head), steps, (x, *tree_leaves(angles)), head
        )

    def rms(self, x: torch.Tensor, weight: torch.Tensor, eps: float, steps: Result) -> torch.Tensor:
        """x / sqrt(mean(x * x) + eps) in fp32, rounded to the dtype of `x`, then * weight.

        Args:
            x: (batch, tokens, channels).
            weight: (channels,), of the dtype of `x`; or of a part of them, and each such part is normalized by itself.
            steps: the framework's own computation, whose result may have any shape.
        """

        def kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            mean = kernels.squared(x).unflatten(-1, (-1, weight.numel())).mean(dim=-1)
            return kernels.scaled(x, torch.rsqrt(mean + eps), weight)

        return self._either("RMS norm", kernel, steps, (x, weight), eps)

    def whole(self, block: nn.Module, ours: Callable[[], T], theirs: Callable[[], T], *like: Any) -> T:
        """A block's result, a tensor or several, its first of a size compared with the framework's own.

        What was put on its parts runs once a call, so a block that is not plain is not compared: its steps are.

        Args:
            like: tensors and values by which sizes differ.
        """
        key = ("block", type(block), *map(_of, like))
        if key not in self._known and why_not_plain(block.modules()):
            return ours()
        return self._either("block", ours, theirs, (), *like, of=type(block))

    def _either(
        self,
        name: str,
        kernel: Callable[..., T],
        steps: Callable[[], T],
        given: tuple[torch.Tensor, ...],
        *like: Any,
        of: type | None = None,
    ) -> T:
        """The result of the kernel, or of the framework's steps.

        Args:
            given: the kernel's tensors. Empty: it consists of steps that have kernels of their own, and is compared
                once with all of them.
            like: what else sizes differ by.
        """
        like = (*given, *like)
        key = (name, of, *map(_of, like))
        if key not in self._known:
            self._known[key] = _Kernel(self._not_compiled(kernel, given))
        known = self._known[key]
        if known.rejected:
            return steps()
        if not all(each.done.is_set() for each in known.awaited):
            return steps()
        known.awaited = ()
        if not given and known.calls and not (known.proven or self._has_all):
            return steps()  # the first call has asked for its kernels; computed both ways, it takes twice as long
        known.calls += 1
        on_device = _on_device_of(like[0])
        if known.proven and (not given or known.calls & (known.calls - 1)):
            with on_device:
                return kernel(*given)
        expected = steps()
        if like[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return expected  # a graph cannot wait for a comparison
        had_all = bool(given) or self._has_all
        try:
            with on_device:
                found = kernel(*given)
            reason = "" if _same(found, expected) else "its kernel gives other bits"
        except Exception as error:
            reason = cause_of(error)
        known.proven = bool(given) or (had_all and self._has_all)
        if reason:
            known.rejected = True
            size = " x ".join(map(str, like[0].shape))
            dtype = str(like[0].dtype).removeprefix("torch.")
            self._on_rejection(f"{name} of {size} {dtype} by the framework's own steps: {reason}")
        return expected

    def _not_compiled(self, kernel: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> list[Kernel]:
        """Those of its launches that no process has compiled, on the way to be. What cannot be run dry is compiled by
        the first launch."""
        if not given or not given[0].is_cuda:
            return []
        with suppress(Exception), noted() as launches:
            kernel(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in given))
            found = COMPILER.start(launches, given[0].device, awaited=True)
            awaited = [each for each in found if not each.done.is_set() and not each.on_disk]
            self._compiling = [each for each in self._compiling if not each.done.is_set()] + awaited
            return awaited
        return []

    @property
    def _has_all(self) -> bool:
        """Whether all kernels that steps have needed until now are compiled."""
        self._compiling = [each for each in self._compiling if not each.done.is_set()]
        return not self._compiling


def _of(value: Any) -> Any:
    """The part of a key that a value gives: all by which kernels differ."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def _alike(x: torch.Tensor, other: torch.Tensor) -> bool:
    return other.shape == x.shape and other.dtype == x.dtype and other.is_contiguous()


def _same(found: Any, expected: Any) -> bool:
    """Equality of tensors, whose shapes may differ, and of what holds some."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return all(
        a is b or (a.dtype == b.dtype and a.numel() == b.numel() and torch.equal(a.view(b.shape), b)) for a, b in pairs
    )


def _on_device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()
