"""A dry run of a call: the operators on meta tensors of its size, to see which Triton kernels it launches.

Nothing is computed, and no device is touched. What a call finds out by comparing values has an answer here: every
kernel gives the framework's bits, and so does cuDNN's engine of each convolution, where there are engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from .model.encoder_graph import EncoderGraph, Graph
from .model.graph import Conv
from .modes.network import History, decode_chunk, encode_chunk, run_in_order
from .operators import fused
from .operators.base import FastOperators, Operators
from .operators.convolution import Convolution
from .operators.engines import Engines
from .operators.launch import Launch, noted
from .operators.strict_checks import Checks
from .operators.strict_convolutions import FRAMEWORK, Way, Ways
from .operators.strict_cuda import StrictCudaOperators
from .operators.strict_kernels import channels_last
from .operators.weights import FastWeights
from .plan import spans


def dry_run(graph, shape, dtype, *, strict, engines, draws=None) -> list[Launch]:
    like = torch.empty(0, dtype=dtype, device="meta")
    graph = _on_meta(graph)
    given = like.new_empty(shape)
    frames = min(graph.extent(shape)[2], 3 if strict else 9)
    with noted() as launches, torch.no_grad():
        if strict:
            for way in draws:
                checks = Checks()
                checks.ways = _DryWays(way)
                checks.prepare(graph, like, None)
                _run(graph, StrictCudaOperators(checks), given, frames, 1)
        else:
            dry = _DryEngines()
            with FastWeights(graph, dtype) as weights:
                ops = FastOperators(weights, None, dry, dry.by_winograd if engines else None)
                _run(graph, ops, given, frames, 8)
    return list(launches)


def _run(graph, ops, given, frames, chunk) -> None:
    encodes = isinstance(graph, EncoderGraph)
    source = given if encodes else ops.quant(graph.post_quant, given)

    def part(start, stop):
        piece = graph.cut(source, 2, start, stop)
        return encode_chunk(graph, ops, piece, first=start == 0) if encodes else decode_chunk(graph, ops, piece, first=start == 0)

    for _ in run_in_order(spans(0, frames, chunk), part, History().answer):
        pass


def _on_meta(part: Any) -> Any:
    """The same part of a graph with weights on meta."""
    if isinstance(part, nn.Module):
        module = object.__new__(type(part))
        own = {name: None if x is None else torch.empty_like(x, device="meta") for name, x in part._parameters.items()}
        module.__dict__ = part.__dict__ | {"_parameters": own}
        return module
    if isinstance(part, Conv):
        return replace(part, module=_on_meta(part.module), resolve=None)
    if isinstance(part, tuple):
        return tuple(map(_on_meta, part))
    if is_dataclass(part):
        return replace(part, **{each.name: _on_meta(getattr(part, each.name)) for each in fields(part)})
    return part


class _DryWays(Ways):
    def __init__(self, way_of):
        super().__init__()
        self._way_of = way_of

    def of(self, conv, shape, padding, like):
        module = conv.current()
        weight, x = like.new_empty(module.weight.shape), like.new_empty(shape)
        way = self._way_of(conv)
        if way is not None:
            return way
        channels_last(weight), channels_last(x)
        full = padding if len(shape) == 4 else (0, *padding)
        out = Convolution(weight, tuple(module.stride), full).output_shape(x)
        return Way(relaid=_convolve, strides=like.new_empty(out).stride())


def _convolve(x, weight, stride, padding):
    return Convolution(weight, tuple(stride), tuple(padding)).empty(x)


class _DryEngines(Engines):
    def __init__(self) -> None:
        super().__init__(None, None)

    def _facts(self, conv, x):
        return {}

    def _chosen_run(self, conv, x, out, facts, search, accept):
        search()
        accept(_nothing)
        return _nothing

    def _fastest(self, conv, x, limit):
        return [_nothing]

    def _build(self, conv, x, out, engine):
        return engine

    def _time_often(self, work):
        work()
        return 0.0

    def _is_close(self, conv, x, out, run):
        run(x, conv.weight, out)
        return True

def _nothing(*args): pass
