"""Blocks that run as one compiled graph, the same for all blocks of a class."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from wanshim.errors import CompileFailed, hint
from wanshim.undo import Undo

# Of one class: devices of a process, times kinds of call (with gradients and without, one shape and any).
MOST_GRAPHS = 64
OUTSIDE = "this submodule runs outside of graphs"


@dataclass
class CompileCount:
    """What was compiled since the start.

    Args:
        graphs: forward graphs; each has a backward of its own.
        recompiled: those of them after the first of their block and device: for another shape, dtype or gradient mode.
        seconds: spent on them before they ran the first time, backward left out.
    """

    graphs: int = 0
    recompiled: int = 0
    seconds: float = 0.0


class CompiledBlocks:
    """Compiles `forward` of a model's blocks, once for all blocks of a class, until `undo` is removed.

    A block is one graph. Around a submodule that is to run outside of graphs, such as attention whose tokens are
    exchanged between ranks, it is four: what the block and the submodule's parent compute before it and behind it.

    Hooks of a block run before and after its graph, as they do around `forward`; parameters are inputs of the graph, so
    their memory may change between calls. Results differ from eager's: a fused kernel rounds to bf16 where it ends, not
    after every operator. A second shape compiles a graph for all shapes. Inductor keeps compiled kernels on disk, so
    that a restart takes them from there.

    Complex arguments reach the graph as pairs of real numbers (`view_as_real`), for inductor has no complex kernels.

    What the compiler cannot take whole raises: no block runs in pieces or without it.

    Args:
        blocks: modules whose first argument is the activation, a tensor.
        outside: path in a block to the submodule of a submodule that runs outside of graphs. Default: none.

    Raises:
        CompileFailed: in a block's call.
    """

    def __init__(self, blocks: Iterable[nn.Module], undo: Undo, *, outside: str | None = None) -> None:
        self.count = CompileCount()
        self._graphs_of_a_block = 1 if outside is None else 4
        self._break: str | None = None  # why a graph ended before its block, or the submodule outside, did
        self._lock = threading.Lock()
        self._on_device: Counter[torch.device | None] = Counter()
        limits = torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=4 * MOST_GRAPHS)
        limits.__enter__()
        undo.add(partial(limits.__exit__, None, None, None))
        if outside is not None:  # or every break raises
            self._watch_breaks(undo)
        compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        for block in blocks:
            kind = type(block)
            if kind not in compiled:
                graph = torch.compile(kind.forward, backend=self._compile, fullgraph=outside is None)
                compiled[kind] = self._entered(graph, kind.forward, kind.__name__)
            if outside is not None:
                _keep_outside(block.get_submodule(outside), undo)
            undo.set(block, {"forward": MethodType(compiled[kind], block)})

    def _watch_breaks(self, undo: Undo) -> None:
        """See each break of our own graphs, also where nothing was computed before it and so no graph ends.

        torch lists breaks by process, also those of other threads.
        """
        output = torch._dynamo.output_graph.OutputGraph
        original = output.compile_subgraph

        @wraps(original)
        def compile_subgraph(graph: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
            backend = getattr(graph.compiler_fn, "_torchdynamo_orig_backend", None)
            own = getattr(backend, "compiler_fn", backend) == self._compile
            if own and reason.graph_break and OUTSIDE not in reason.reason:
                self._break = reason.reason
            return original(graph, tx, reason, *args, **kwargs)

        undo.add(partial(setattr, output, "compile_subgraph", original))
        output.compile_subgraph = compile_subgraph  # type: ignore[method-assign]

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        start = time.perf_counter()
        result: Callable[..., Any] = compile_fx(graph, inputs)
        device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), None)
        with self._lock:
            self.count.graphs += 1
            self._on_device[device] += 1
            self.count.recompiled += self._on_device[device] > self._graphs_of_a_block
            self.count.seconds += time.perf_counter() - start
        return result

    def _entered(self, graph: Callable[..., Any], original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(original)  # whoever reads the block's arguments finds them
        def forward(block: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.is_contiguous():
                x = x.view(x.shape)  # the stride of a dimension of one may be any, and the compiler compares it
            if torch.is_grad_enabled() and not x.requires_grad:
                x = x.detach().requires_grad_()  # the first block's input: with it, all blocks are one graph
            try:
                result = graph(block, x, *map(_real, args), **{name: _real(value) for name, value in kwargs.items()})
            except torch._dynamo.exc.TorchDynamoException as error:
                raise _broken(name, str(error)) from error
            if self._break is not None:
                raise _broken(name, self._break)
            if 0 < self.count.graphs < self._graphs_of_a_block:
                raise _broken(name, "the compiler skipped a part of it, as it does where a loop breaks a graph")
            return result

        return forward


def compiler_refusal(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device, or None."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler: install g++ or clang++"
        return None
    from torch.utils._triton import has_triton

    return None if has_triton() else f"there is no Triton for {device.type}: install triton"


def _broken(name: str, reason: str) -> CompileFailed:
    return CompileFailed(
        f"{name} does not compile as one graph: {reason.strip().splitlines()[0]}",
        expected="blocks without a graph break",
        hint=hint("compile_off"),
    )


def _keep_outside(module: nn.Module, undo: Undo) -> None:
    """Its calls, hooks included, run outside of graphs. All such modules of a class stay of one class."""
    original = type(module)
    undo.add(partial(setattr, module, "__class__", original))
    module.__class__ = _outside(original)  # type: ignore[arg-type]


@cache
def _outside(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__call__": torch._dynamo.disable(kind.__call__, reason=OUTSIDE)})


def _real(value: Any) -> Any:
    return torch.view_as_real(value) if isinstance(value, torch.Tensor) and value.is_complex() else value
