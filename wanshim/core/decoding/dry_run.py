"""A dry run of a call: the operators on meta tensors of its size, to note which Triton kernels it launches.

Nothing is computed, and no device is touched. What a call finds out by comparing values has an answer here: each kernel
gives the framework's bits, and each convolution goes one way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from wanshim.core.shared.kernel_launch import Launch, noted

from .model.graph import Conv, EncoderGraph, Graph
from .modes.network import History, VaeRun, run_in_order
from .operators import fused
from .operators.base import FastOperators, Operators
from .operators.convolution import Convolution
from .operators.strict_checks import Checks
from .operators.strict_convolutions import FRAMEWORK, Way, Ways
from .operators.strict_cuda import StrictCudaOperators
from .operators.strict_kernels import channels_last
from .operators.weights import FastWeights
from .operators.winograd import PARTS, Buffers, DeferredOutput
from .plan import spans

_USUAL = (480, 832), (720, 1280)  # height and width of the videos whose kernels are compiled before the first call
_STRICT, _FAST = (3, 1), (9, 8)  # latent frames, and those of a step: what follows launches the same
_APART = Way(padded=True, biased=False)  # zeros in memory, the bias added later
# The ways that strict convolutions may go, repeated over those of a call (None: channels last, by an engine of cuDNN):
# all by engines; every other one not, as cuDNN may have it for some; all by torch.
_WAYS: dict[str, tuple[tuple[Way | None, ...], ...]] = {
    "engines": ((None,),),
    "either": ((None, _APART), (_APART, None)),
    "torch": ((Way(padded=False, biased=False),), (_APART,), (FRAMEWORK,)),
}


def usual_shapes(graph: Graph) -> list[tuple[int, ...]]:
    """Shapes of the inputs of calls that are likely to come."""
    pixels, frames = graph.scale_s * graph.patch_size, _FAST[0]
    latents = [(side // (2 * pixels) * 2 for side in size) for size in _USUAL]  # they have even sizes
    if isinstance(graph, EncoderGraph):
        return [(1, graph.input_channels, graph.frames(frames), *(pixels * side for side in size)) for size in latents]
    return [(1, graph.input_channels, frames, *size) for size in latents]


@torch.no_grad()
def dry_run(graph: Graph, shape: Sequence[int], dtype: torch.dtype, *, strict: bool, by: str) -> list[Launch]:
    """The launches of a call on one GPU, in the order of use.

    Args:
        shape: of its input.
        by: what the convolutions go by, a key of `_WAYS`. Fast ones use Winograd's method by engines alone.
    """
    graph, given = _on_meta(graph), torch.empty(tuple(shape), dtype=dtype, device="meta")
    with noted() as launches:
        if strict:
            for ways in _WAYS[by]:
                checks = Checks()
                checks.ways = _DryWays(ways)
                checks.prepare(graph, given, None)
                _run(graph, StrictCudaOperators(checks), given, *_STRICT)
        else:
            with FastWeights(graph, dtype) as weights:
                ops = FastOperators(weights, None, _convolve, _by_winograd if by == "engines" else None)
                _run(graph, ops, given, *_FAST)
    return list(launches)


def _run(graph: Graph, ops: Operators, given: torch.Tensor, frames: int, chunk: int) -> None:
    unused: dict[str, Any] = dict.fromkeys(("job", "plan", "comm", "sink"))
    run = VaeRun(graph=graph, ops=ops, given=given, **unused)
    steps = spans(0, min(graph.extent(given.shape)[2], frames), chunk)
    for _ in run_in_order(steps, partial(run.chunk, run.source()), History().answer):
        pass


def _on_meta(part: Any) -> Any:
    """A part of a graph with weights that have shapes and no values, and without what the user's calls alone run."""
    if isinstance(part, nn.Module):
        copy = object.__new__(type(part))
        meta = {k: None if x is None else torch.empty_like(x, device="meta") for k, x in part._parameters.items()}
        copy.__dict__ = part.__dict__ | {"_parameters": meta, "_forward_hooks": {}, "_forward_pre_hooks": {}}
        copy.__dict__.pop("forward", None)
        return copy
    if isinstance(part, Conv):
        return replace(part, module=_on_meta(part.module), resolve=None)
    if isinstance(part, tuple):
        return tuple(map(_on_meta, part))
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{each.name: _on_meta(getattr(part, each.name)) for each in fields(part)})
    return part


class _DryWays(Ways):
    """Ways that no comparison has found."""

    def __init__(self, ways: tuple[Way | None, ...]) -> None:
        super().__init__()
        self._ways, self._numbers = ways, dict[str, int]()

    def of(self, conv: Conv, shape: tuple[int, ...], padding: tuple[int, int], like: torch.Tensor) -> Way:
        number = self._numbers.setdefault(conv.name, len(self._numbers))
        way = self._ways[number % len(self._ways)]
        if way is not None:
            return way
        module = conv.current()
        weight, x = like.new_empty(module.weight.shape), like.new_empty(shape)
        channels_last(weight)
        channels_last(x)
        whole = Convolution(weight, tuple(module.stride), padding if len(shape) == 4 else (0, *padding))
        return Way(relaid=_convolve, strides=like.new_empty(whole.output_shape(x)).stride())


def _convolve(x: torch.Tensor, weight: torch.Tensor, stride: tuple[int, ...], padding: tuple[int, ...]) -> torch.Tensor:
    """An empty result, channels last. torch's own on meta lies otherwise."""
    return Convolution(weight, tuple(stride), tuple(padding)).empty(x)


def _by_winograd(
    x: torch.Tensor, weight: torch.Tensor, split: Callable[[], torch.Tensor], padding: tuple[int, ...]
) -> DeferredOutput | None:
    """As `Engines.by_winograd` in one piece, where it is faster; what it compares and times included."""
    conv = Convolution(weight, (1, 1, 1), tuple(padding))
    out = conv.empty(x)
    if out.shape[2] < 3:
        return None
    weights, convolve = weight.expand(PARTS, *weight.shape), lambda *tensors: None
    for main in (Buffers(x, out.shape).multiply(x, weights, convolve), out):
        fused.sum_into(main, None, None, out)
    return DeferredOutput(x, out.shape, weights, [(0, out.shape[2], convolve)])
