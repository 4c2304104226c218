"""Launches of Triton kernels: executed, or noted in a dry run.

In a dry run the operators are given meta tensors, which have shapes and strides, and no memory on any device. They
launch nothing then: each launch is noted as Triton tells launches apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from wanshim.core.shared.optional_triton import triton

ALIGNED = 16  # Triton tells apart pointers, and integers, that are multiples of it


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch for which Triton compiles one kernel.

    Args:
        kernel: Triton's function.
        arguments: in order, what Triton knows of each: its dtype, whether it is a multiple of 16, or its value.
        options: of the launch, such as `num_warps`.
        values: an example of each argument.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    values: tuple[Any, ...] = field(compare=False, repr=False)

    def compile(self) -> None:
        """Compile it for the current device, or load what Triton has on disk. The device itself is not touched: what
        another thread captures in a graph of CUDA would end."""
        compiled = self.kernel.warmup(*self.values, grid=(1,), **dict(self.options))
        with suppress(AttributeError, TypeError):  # releases before 3.7 compile what launches it, too
            triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


_noted: ContextVar[dict[Launch, None] | None] = ContextVar("launches of a dry run", default=None)


@contextmanager
def noted() -> Iterator[dict[Launch, None]]:
    """The launches of a dry run inside, each once, in the order of use."""
    launches: dict[Launch, None] = {}
    token = _noted.set(launches)
    try:
        yield launches
    finally:
        _noted.reset(token)


def takes_kernels(x: torch.Tensor) -> bool:
    """Is `x` on a GPU, or in a dry run in place of what would be?"""
    return x.is_cuda or (x.is_meta and _noted.get() is not None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **given: Any) -> None:
    """`kernel[grid](...)`, or in a dry run a note of it."""
    launches = _noted.get()
    if launches is None:
        kernel[grid](*args, **given)
        return
    options = {name: given.pop(name) for name in list(given) if name not in kernel.arg_names}
    values = dict(zip(kernel.arg_names, args)) | given
    kinds, examples = zip(*(_told_apart(each, values[each.name]) for each in kernel.params))
    launches[Launch(kernel, kinds, tuple(options.items()), examples)] = None


def _told_apart(parameter: Any, value: Any) -> tuple[Any, Any]:
    """The facts by which Triton tells an argument of a kernel from another, and an example of it."""
    if isinstance(value, torch.Tensor):
        pointer, aligned = triton.runtime.jit.MockTensor(value.dtype), value.data_ptr() % ALIGNED == 0
        if not aligned:
            pointer.data_ptr = lambda: ALIGNED // 2
        return (value.dtype, aligned), pointer
    if parameter.is_constexpr:
        return value, value
    if isinstance(value, float):
        return float, value
    wide, whole = value >= 2**31, not parameter.do_not_specialize
    return (wide, whole and value == 1, whole and value % ALIGNED == 0), value
