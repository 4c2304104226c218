"""Checks of what this device computes to the same bits in another way: found out here, on the device, and never
assumed.

A norm's kernel and SiLU's are compared with the framework's before the first decode, a convolution before the first of
its size (`strict_convolutions.py`). In which order torch adds the squares of a norm depends on sizes, strides and
alignment of what it reads, so a shortcut there is compared for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from wanshim.core.decoding.model.graph import Graph, Norm
from wanshim.core.shared.plain import has_own_forward
from wanshim.core.shared.recent import Recent

from . import strict_kernels as kernels
from .engines import Engines
from .strict_convolutions import ALIGNED, Ways


class Sizes(Enum):
    """In what a norm computes the lengths it divides by."""

    WIDE = "fp32, of values cast first"
    NARROW = "the dtype of the values"
    OWN = "a way that only the module knows"


class Checks:
    """The answers, kept from decode to decode.

    Args:
        replaced: whether a module has a forward that may give other bits than its class's.
    """

    def __init__(self, replaced: Callable[[nn.Module], bool] = has_own_forward) -> None:
        self.ways = Ways()
        self._replaced = replaced
        self._norms: dict[tuple[object, ...], Sizes] = {}
        self._cast_inside: Recent[tuple[object, ...], bool] = Recent()
        self._silu: dict[torch.dtype, bool] = {}

    def prepare(self, graph: Graph, like: torch.Tensor, engines: Engines | None) -> bool:
        """Compare norms and SiLU; can all norms be computed in one kernel?

        Args:
            engines: what may compute convolutions channels last; None: they stay as the framework lays them out.
        """
        self.ways.engines = engines
        if like.dtype not in self._silu:
            self._silu[like.dtype] = like.itemsize == 2 and _same_silu(like)
        return Sizes.OWN not in {self.norm(norm, like) for norm in graph.norms()}

    def norm(self, norm: Norm, like: torch.Tensor) -> Sizes:
        """The precision with which the kernel gets the bits of `norm.module` for values like these."""
        if norm.bias is not None or norm.gamma.dtype != like.dtype or norm.gamma.device != like.device:
            return Sizes.OWN
        module = norm.module
        if module._forward_hooks or module._forward_pre_hooks or self._replaced(module):
            return Sizes.OWN
        key = (type(module), has_own_forward(module), like.dtype, norm.eps, _autocast(like))
        if key not in self._norms:
            ways = (way for way in (Sizes.WIDE, Sizes.NARROW) if _same_norm(norm, like, way))
            self._norms[key] = next(ways, Sizes.OWN)
        return self._norms[key]

    def sizes(self, norm: Norm, x: torch.Tensor, way: Sizes) -> torch.Tensor:
        """`sizes`, without a copy of `x` in fp32 where that adds in the same order."""
        if way is Sizes.WIDE and x.itemsize == 2:
            key = (x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % ALIGNED)
            if key not in self._cast_inside:
                self.ways.settle()
                self._cast_inside[key] = _adds_alike(x)
            if self._cast_inside[key]:
                return _lengths(x, torch.float32).clamp_min_(norm.eps)
        return sizes(norm, x, way)

    def silu(self, dtype: torch.dtype) -> bool:
        """Is the kernel's SiLU torch's? Known for 16-bit values, of which all were compared."""
        return self._silu.get(dtype, False)


class _Lengths(TorchDispatchMode):
    """Notes in what dtypes lengths are computed. torch's own `__enter__` also sets one flag for all threads: two modes
    that overlap in two threads leave it set, and torch.compile then compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __enter__(self) -> _Lengths:
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.linalg_vector_norm.default:
            self.dtypes.add(kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


def seen_sizes(module: nn.Module, x: torch.Tensor) -> Sizes:
    """In what a framework's norm computes the lengths of `x`, without a comparison. Hooks are for the user's calls."""
    seen = _Lengths()
    with suppress(Exception), torch.no_grad(), seen:
        type(module).forward(module, x)
    return Sizes.NARROW if seen.dtypes == {x.dtype} != {torch.float32} else Sizes.WIDE


@torch.no_grad()
def keep_dtype(graph: Graph, dtype: torch.dtype) -> bool:
    """Do the framework's norms return the dtype they are given? Under autocast, which computes lengths in fp32, not all
    do."""
    with suppress(Exception):
        return all(module.forward(zeros).dtype == dtype for module, zeros in _one_of_each(graph, dtype))
    return False


def _one_of_each(graph: Graph, dtype: torch.dtype) -> Iterator[tuple[Any, torch.Tensor]]:
    """A norm of each kind and zeros for its `forward`, without hooks, which are for the user's calls."""
    for norm in {(type(norm.module), norm.module.gamma.dim()): norm for norm in graph.norms()}.values():
        dims = norm.module.gamma.dim()
        yield norm.module, norm.gamma.new_zeros((1, norm.gamma.numel(), *[1] * (dims - 1)), dtype=dtype)


def sizes(norm: Norm, x: torch.Tensor, way: Sizes) -> torch.Tensor:
    """The divisor of the norm of `x`, [B, 1, T, H, W]; torch's own reduction, in torch's order."""
    return _lengths(x.float() if way is Sizes.WIDE else x).clamp_min_(norm.eps)


def _lengths(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    if x.is_meta:  # in a tenth of torch's time
        return x.new_empty((len(x), 1, *x.shape[2:]), dtype=dtype)
    return torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=dtype)


def _adds_alike(x: torch.Tensor) -> bool:
    """Does a cast to fp32 inside the reduction of values that lie as `x` leave every length as it is?

    The values are random, for those of `x` may be zeros, and begin as far from a multiple of `ALIGNED` bytes.
    """
    if x.is_meta:
        return True
    first = x.data_ptr() % ALIGNED // x.itemsize
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    generator = torch.Generator(x.device).manual_seed(0)
    values = x.new_empty(first + span).normal_(generator=generator).as_strided(x.shape, x.stride(), first)
    return torch.equal(_lengths(values, torch.float32), _lengths(values.float()))


def _autocast(x: torch.Tensor) -> bool:
    """It computes the lengths of some norms in fp32."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _same_norm(norm: Norm, like: torch.Tensor, way: Sizes) -> bool:
    """On values of many binades, with zeros and a position of zeros."""
    generator = None if like.is_meta else torch.Generator(like.device).manual_seed(0)
    shape = (2, norm.gamma.numel(), 2, 16, 24)
    x = torch.randn(shape, generator=generator, device=like.device)
    x *= torch.exp2(torch.randint(-12, 8, shape, generator=generator, device=like.device))
    x[:, :, :, 0, 0] = 0
    x = x.to(like.dtype)
    out = torch.empty_like(x)
    kernels.norm_into(x, sizes(norm, x, way), norm.gamma, norm.scale, out, silu=False)
    frames = norm.module.gamma.dim() == 3  # the attention's norm takes frames one by one
    if x.is_meta:
        return way is seen_sizes(norm.module, x[:, :, 0] if frames else x)
    return torch.equal(out, torch.stack([norm.module(x[:, :, t]) for t in (0, 1)], 2) if frames else norm.module(x))


def _same_silu(like: torch.Tensor) -> bool:
    """On all 65,536 values of a 16-bit dtype, through a norm that changes nothing."""
    bits = torch.arange(-(2**15), 2**15, device=like.device, dtype=torch.int32).to(torch.int16).view(like.dtype)
    x = torch.where(bits.isnan(), torch.zeros_like(bits), bits).view(1, 1, 1, 1, -1)
    one, out = torch.ones(1, device=like.device, dtype=like.dtype), torch.empty_like(x)
    kernels.norm_into(x, torch.ones_like(x), one, 1.0, out, silu=True)
    expected = F.silu(x)
    return out.is_meta or bool(((out == expected) | (out.isnan() & expected.isnan())).all())
