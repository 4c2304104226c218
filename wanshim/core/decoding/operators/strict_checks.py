"""What this device computes to the same bits in another way: found out here, on the device, and never assumed.

A norm's kernel is compared with the framework's module before the first decode. A convolution is compared at its first
call of each shape, on the data at hand and without waiting: until the answer is there, and wherever it is no, the
convolution runs as the framework runs it.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from wanshim.core.decoding.model.encoder_graph import Graph
from wanshim.core.decoding.model.graph import Conv, Norm

from . import strict_kernels as kernels
from .convolution import Convolve, torch_convolve
from .engines import Engines


class Sizes(Enum):
    """In what a norm computes the lengths it divides by."""

    WIDE = "fp32"
    NARROW = "the dtype of the values"
    OWN = "a way that only the module knows"


class Checks:
    """The answers, kept from decode to decode."""

    def __init__(self) -> None:
        self._engines: Engines | None = None
        self._norms: dict[tuple[type, torch.dtype, float], Sizes] = {}
        self._silu: dict[torch.dtype, bool] = {}
        self._trials: dict[tuple[Conv, tuple[int, ...], torch.dtype], Trial] = {}
        self._padded: set[Conv] = set()
        self._biased: set[Conv] = set()

    def prepare(self, graph: Graph, like: torch.Tensor, engines: Engines | None) -> bool:
        """Compare everything that waits for the device; can all norms be computed in one kernel?

        Args:
            engines: what may compute convolutions channels last; None: they stay as the framework lays them out.
        """
        self._engines = engines
        if like.dtype not in self._silu:
            self._silu[like.dtype] = like.itemsize == 2 and _same_silu(like)
        return Sizes.OWN not in {self.norm(norm, like) for norm in graph.norms()}

    def norm(self, norm: Norm, like: torch.Tensor) -> Sizes:
        """How the kernel gets the bits of `norm.module` for values like these."""
        if norm.bias is not None or norm.gamma.dtype != like.dtype or norm.gamma.device != like.device:
            return Sizes.OWN
        if not _bare(norm.module):
            return Sizes.OWN
        key = (type(norm.module), like.dtype, norm.eps)
        if key not in self._norms:
            ways = (way for way in (Sizes.WIDE, Sizes.NARROW) if _same_norm(norm, like, way))
            self._norms[key] = next(ways, Sizes.OWN)
        return self._norms[key]

    def silu(self, dtype: torch.dtype) -> bool:
        """Is the kernel's SiLU torch's? Known for 16-bit values, of which all were compared."""
        return self._silu.get(dtype, False)

    def pads(self, conv: Conv) -> bool:
        """Must the zeros around the input of `conv` lie in memory?"""
        return conv in self._padded

    def reads_channels_last(self, conv: Conv, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Is an input of `shape` convolved channels last? No, until that is known."""
        trial = self._trials.get((conv, shape, dtype))
        return trial is not None and trial.known() and trial.relaid is not None and conv not in self._biased

    def channels_first(self) -> list[str] | None:
        """The convolutions that were compared and are not computed channels last; None: there was none to compare."""
        if not self._trials:
            return None
        return sorted({conv.name for conv, *key in self._trials if not self.reads_channels_last(conv, *key)})

    def convolve(self, conv: Conv, x: torch.Tensor, padding: tuple[int, int]) -> tuple[torch.Tensor, Any]:
        """`x` [B, C, T, H, W] or [B * T, C, H, W] through `conv`: the result, and the bias that it lacks.

        The result may be channels last in memory, and so may `x` be where `reads_channels_last` says so.
        """
        module = conv.current()
        key = (conv, tuple(x.shape), x.dtype)
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = Trial(x, module, padding, self._engines)
            return trial.take_expected(), None
        if not trial.known():
            return as_framework(x, module, padding), None
        if trial.padded:
            self._padded.add(conv)
        if trial.biased:
            self._biased.add(conv)
        if trial.relaid is not None and conv not in self._biased:
            return _convolve_relaid(trial.relaid, x, module, padding), module.bias
        return _convolve(x.contiguous(), module, padding, pad=conv in self._padded, biased=conv in self._biased)


class Trial:
    """One convolution computed in all ways; the answers come to the host when the device is there."""

    def __init__(self, x: torch.Tensor, module: Any, padding: tuple[int, int], engines: Engines | None) -> None:
        self.padded = self.biased = True
        self.relaid: Convolve | None = None  # what convolves channels last
        self._candidate: Convolve | None = None
        self._event: torch.cuda.Event | None = None
        self._known = False
        self._answers = torch.zeros(3, dtype=torch.bool)  # no, if the memory does not suffice to compare
        self._expected: torch.Tensor | None = as_framework(x, module, padding)
        try:
            self._compare(x, module, padding, self._expected, engines)
        except torch.OutOfMemoryError:
            self._event = None

    def take_expected(self) -> torch.Tensor:
        expected, self._expected = self._expected, None
        assert expected is not None
        return expected

    def known(self) -> bool:
        if self._known:
            return True
        if self._event is not None and not self._event.query():
            return False
        self._known = True
        same_unbiased, same_unpadded, same_relaid = self._answers.tolist()
        self.biased, self.padded = not same_unbiased, not same_unpadded
        self.relaid = self._candidate if same_relaid else None
        return True

    def _compare(
        self, x: torch.Tensor, module: Any, padding: tuple[int, int], expected: torch.Tensor, engines: Engines | None
    ) -> None:
        plain, _ = _convolve(x, module, padding, pad=True, biased=False)
        unbiased = (_with_bias(plain, module.bias) == expected).all()
        unpadded, _ = _convolve(x, module, padding, pad=False, biased=False)
        same_unpadded = (unpadded == plain).all()
        del unpadded
        same_relaid = torch.zeros_like(same_unpadded)
        if engines is not None and plain.shape[-2:].numel() > 1:  # one position is both channels first and last
            with suppress(torch.OutOfMemoryError):  # the other answers stand
                same_relaid = self._same_relaid(x, module, padding, plain, engines)
        answers = torch.stack([unbiased, same_unpadded, same_relaid])
        if x.is_cuda:
            self._answers = torch.empty(3, dtype=torch.bool, pin_memory=True)
            self._event = torch.cuda.Event()
        self._answers.copy_(answers, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def _same_relaid(
        self, x: torch.Tensor, module: Any, padding: tuple[int, int], plain: torch.Tensor, engines: Engines
    ) -> torch.Tensor:
        """Is there a way to convolve channels last whose result is `plain`? It is left in `_candidate`."""
        last, weight = kernels.channels_last(x), kernels.channels_last(module.weight)
        expected = kernels.channels_last(plain)
        engine = engines.equal(last, weight, module.stride, _full(x, padding), expected)
        self._candidate = engine or torch_convolve
        del last, weight, expected
        if engine is not None:
            return plain.new_ones((), dtype=torch.bool)
        return (_convolve_relaid(self._candidate, x, module, padding) == plain).all()


def _convolve_relaid(convolve: Convolve, x: torch.Tensor, module: Any, padding: tuple[int, int]) -> torch.Tensor:
    weight = kernels.channels_last(module.weight)
    return convolve(kernels.channels_last(x), weight, module.stride, _full(x, padding))


def _full(x: torch.Tensor, padding: tuple[int, int]) -> tuple[int, ...]:
    return padding if x.dim() == 4 else (0, *padding)


def as_framework(x: torch.Tensor, module: Any, padding: tuple[int, int]) -> torch.Tensor:
    """The convolution as the frameworks call it: 3-D inputs padded in memory, the bias inside."""
    return _convolve(x, module, padding, pad=True, biased=True)[0]


def sizes(norm: Norm, x: torch.Tensor, way: Sizes) -> torch.Tensor:
    """What the norm of `x` divides by, [B, 1, T, H, W]; torch's own reduction, in torch's order."""
    wide = torch.float32 if way is Sizes.WIDE else None
    return torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=wide).clamp_min_(norm.eps)


def _convolve(
    x: torch.Tensor, module: Any, padding: tuple[int, int], *, pad: bool, biased: bool
) -> tuple[torch.Tensor, Any]:
    inside, late = (module.bias, None) if biased else (None, module.bias)
    if x.dim() == 4:
        return F.conv2d(x, module.weight, inside, module.stride, padding), late
    if pad and any(padding):
        x, padding = F.pad(x, (padding[1], padding[1], padding[0], padding[0])), (0, 0)
    return F.conv3d(x, module.weight, inside, module.stride, (0, *padding)), late


def _with_bias(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias.view(1, -1, *[1] * (x.dim() - 2))


def _bare(module: nn.Module) -> bool:
    """Does calling it run its class's `forward` and nothing else?"""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _same_norm(norm: Norm, like: torch.Tensor, way: Sizes) -> bool:
    """On values of many binades, with zeros and a position of zeros."""
    generator = torch.Generator(like.device).manual_seed(0)
    shape = (2, norm.gamma.numel(), 2, 16, 24)
    x = torch.randn(shape, generator=generator, device=like.device)
    x *= torch.exp2(torch.randint(-12, 8, shape, generator=generator, device=like.device))
    x[:, :, :, 0, 0] = 0
    x = x.to(like.dtype)
    out = torch.empty_like(x)
    kernels.norm_into(x, sizes(norm, x, way), norm.gamma, norm.scale, out, silu=False)
    frames = norm.module.gamma.dim() == 3  # the attention's norm takes frames one by one
    return torch.equal(out, torch.stack([norm.module(x[:, :, t]) for t in (0, 1)], 2) if frames else norm.module(x))


def _same_silu(like: torch.Tensor) -> bool:
    """On all 65,536 values of a 16-bit dtype, through a norm that changes nothing."""
    bits = torch.arange(-(2**15), 2**15, device=like.device, dtype=torch.int32).to(torch.int16).view(like.dtype)
    x = torch.where(bits.isnan(), torch.zeros_like(bits), bits).view(1, 1, 1, 1, -1)
    one, out = torch.ones(1, device=like.device, dtype=like.dtype), torch.empty_like(x)
    kernels.norm_into(x, torch.ones_like(x), one, 1.0, out, silu=True)
    expected = F.silu(x)
    return bool(((out == expected) | (out.isnan() & expected.isnan())).all())
