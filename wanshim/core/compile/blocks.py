"""Blocks that run as one compiled graph, the same for all blocks of a class."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import nn

from wanshim.core.shared.fallback import cause_of
from wanshim.core.shared.gpu_memory import is_memory
from wanshim.core.shared.graphs import OUTSIDE, outside_graphs
from wanshim.errors import WanshimError
from wanshim.undo import Undo

# Of one class: devices of a process, times kinds of call (with gradients and without, one shape and any).
MOST_GRAPHS = 64


@dataclass
class CompileCount:
    """Counts of what was compiled since the start.

    Args:
        graphs: forward graphs; each has a backward of its own.
        recompiled: those of them after the first of their block and device: for another shape, dtype or gradient mode.
        seconds: spent on them before they ran the first time, backward left out.
    """

    graphs: int = 0
    recompiled: int = 0
    seconds: float = 0.0
    eager: Counter[str] = field(default_factory=Counter)  # graphs that run without the compiler, by the cause


class CompiledBlocks:
    """Compiles `forward` of a model's blocks, once for all blocks of a class, until `undo` is removed.

    A block is one graph. Around a submodule that is to run outside of graphs, such as attention whose tokens are
    exchanged between ranks, it is four: what the block and the submodule's parent compute before it and behind it.

    Hooks of a block run before and after its graph, as they do around `forward`; parameters are inputs of the graph, so
    their memory may change between calls. Results differ from eager's: a fused kernel rounds to bf16 where it ends, not
    after every operator. A second shape compiles a graph for all shapes. Inductor keeps compiled kernels on disk, so
    that a restart takes them from there.

    Complex arguments reach the graph as pairs of real numbers (`view_as_real`), for inductor has no complex kernels.

    Args:
        blocks: modules whose first argument is the activation, a tensor.
        by_value: named arguments of the blocks, tensors of a few numbers, which the graph gets as numbers, for it
            cannot read them out of a tensor. Other numbers compile a graph for any.
        outside: path in a block to the submodule of a submodule that runs outside of graphs; or the function that a
            submodule calls, by module and name. Default: none.
        alike: processes that compute the same have the same bits: each size is a graph of its own, whatever came
            before it, and no kernel is chosen by its time.
        on_fallback: takes the cause, in one line, for which a graph or all blocks of a class are computed without the
            compiler. A graph that has no kernels runs as the operators in it, so that nothing is computed twice and
            ranks exchange as before. None: it is raised, and no block runs in pieces or without the compiler.

    Raises:
        WanshimError: in a block's call, without `on_fallback`.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        undo: Undo,
        *,
        outside: str | None = None,
        by_value: Collection[str] = (),
        alike: bool = False,
        on_fallback: Callable[[str], None] | None = None,
    ) -> None:
        self.count = CompileCount()
        self._on_fallback, self._by_value, self._alike = on_fallback, by_value, alike
        self._graphs_of_a_block = 1 if outside is None else 4
        self._break: str | None = None  # why a graph ended before its block, or the submodule outside, did
        self._lock = threading.Lock()
        self._on_device: Counter[torch.device | None] = Counter()
        self._compiled: dict[tuple[type[nn.Module], Callable[..., Any]], Callable[..., Any]] = {}
        limits = graph_limits()
        limits.__enter__()
        undo.add(partial(limits.__exit__, None, None, None))
        if outside is not None:  # or every break raises
            self._watch_breaks(undo)
        owner, _, function = (outside or "").partition(":")
        if function:
            undo.replace(import_module(owner), function, outside_graphs)
        for block in blocks:
            compiled = self.compiled(type(block), type(block).forward)
            if outside is not None and not function:
                _keep_outside(block.get_submodule(outside), undo)
            undo.set(block, {"forward": MethodType(compiled, block)})

    def compiled(self, kind: type[nn.Module], forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of blocks of a class, compiled. Its caller may have to raise `graph_limits`."""
        if (kind, forward) not in self._compiled:
            graph = torch.compile(
                forward,
                backend=self._compile,
                fullgraph=self._graphs_of_a_block == 1,
                dynamic=False if self._alike else None,
            )
            self._compiled[kind, forward] = self._entered(graph, forward, kind.__name__)
        return self._compiled[kind, forward]

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
        device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), None)
        try:
            with _backward_too(), _without_timing() if self._alike else contextlib.nullcontext():
                result: Callable[..., Any] = self._or_eager(compile_fx(graph, inputs), graph)
        except Exception as error:
            if self._on_fallback is None or is_memory(error):
                raise
            self._fall_back(_cause_of(error))
            result = graph.forward
        with self._lock:
            self.count.graphs += 1
            self._on_device[device] += 1
            self.count.recompiled += self._on_device[device] > self._graphs_of_a_block
            self.count.seconds += time.perf_counter() - start
        return result

    def _or_eager(self, compiled: Callable[..., Any], graph: torch.fx.GraphModule) -> Callable[..., Any]:
        """`compiled`, whose kernels a GPU may refuse at their first launch; then the operators of `graph`."""
        if self._on_fallback is None:
            return compiled
        chosen: Callable[..., Any] | None = None

        def run(*args: Any) -> Any:
            nonlocal chosen
            if chosen is not None:
                return chosen(*args)
            try:
                result = compiled(*args)
            except Exception as error:
                if is_memory(error):
                    raise
                self._fall_back(_cause_of(error))
                chosen = graph.forward
                return chosen(*args)
            chosen = compiled
            return result

        return run

    def _for_graph(self, name: str, value: Any) -> Any:
        is_read = name in self._by_value and isinstance(value, torch.Tensor)
        return tuple(value.tolist()) if is_read else _real(value)

    def _fall_back(self, cause: str) -> None:
        if cause not in self.count.eager and self._on_fallback is not None:
            self._on_fallback(cause)
        self.count.eager[cause] += 1

    def _entered(self, graph: Callable[..., Any], original: Callable[..., Any], name: str) -> Callable[..., Any]:
        eager = False

        @wraps(original)  # whoever reads the block's arguments finds them
        def forward(block: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal eager
            if eager:
                return original(block, x, *args, **kwargs)
            given = x
            if x.is_contiguous():
                x = x.view(x.shape)  # the stride of a dimension of one may be any, and the compiler compares it
            if torch.is_grad_enabled() and not x.requires_grad:
                x = x.detach().requires_grad_()  # the first block's input: with it, all blocks are one graph
            try:
                result = graph(block, x, *map(_real, args), **{n: self._for_graph(n, v) for n, v in kwargs.items()})
            except torch._dynamo.exc.TorchDynamoException as error:
                if self._on_fallback is None or self._graphs_of_a_block > 1:  # ranks may have exchanged something
                    raise _broken(name, _text_of(error)) from error
                self._fall_back(_broken(name, _text_of(error)).found)
                eager = True
                return original(block, given, *args, **kwargs)
            why, self._break = self._break, None
            if why is None and 0 < self.count.graphs < self._graphs_of_a_block:
                why = "the compiler skipped a part of it, as it does where a loop breaks a graph"
            if why is not None:
                if self._on_fallback is None:
                    self._break = why
                    raise _broken(name, why)
                self._fall_back(_broken(name, why).found)  # in pieces, of which some are compiled
            return result

        return forward


def graph_limits() -> contextlib.AbstractContextManager[Any]:
    """As many graphs as blocks of a class may need."""
    return torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=4 * MOST_GRAPHS)


@cache
def compiler_refusal(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device, or None: a small function is compiled and run, forward and backward.
    A compiler, Python's headers, Triton's assembler and a folder for kernels are there, or this shows it."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), _backward_too():
            x = torch.ones(4, 16, device=device, requires_grad=True)
            torch.compile(_small, fullgraph=True)(x).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return f"nothing can be compiled for {device.type}: {_cause_of(error)}"
    return None


def _cause_of(error: BaseException) -> str:
    """The error that torch has wrapped, in one line: torch's own text begins with the name of the backend."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    return cause_of(error)


def _text_of(error: BaseException) -> str:
    return _cause_of(error) if hasattr(error, "inner_exception") else str(error)


def _small(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.amax(-1, keepdim=True)).sum()


def _backward_too() -> contextlib.AbstractContextManager[Any]:
    """A graph's backward is compiled with it, or a failure there would end a step in its middle."""
    config = torch._functorch.config
    name = "force_non_lazy_backward_lowering"
    return config.patch(name, True) if hasattr(config, name) else contextlib.nullcontext()


def _without_timing() -> contextlib.AbstractContextManager[Any]:
    """No reduction is chosen by its time, which differs from process to process, and its order with it."""
    import torch._inductor.config as config

    has_it = hasattr(config, "deterministic")
    return config.patch(deterministic=True) if has_it else contextlib.nullcontext()  # type: ignore[no-any-return]


def _broken(name: str, reason: str) -> WanshimError:
    return WanshimError(
        f"{name} does not compile as one graph: {reason.strip().splitlines()[0]}",
        expected="blocks without a graph break",
        topic="compile_off",
    )


def _keep_outside(module: nn.Module, undo: Undo) -> None:
    """Its calls, hooks included, run outside of graphs. All such modules of a class stay of one class."""
    original = type(module)
    undo.add(partial(setattr, module, "__class__", original))
    module.__class__ = _outside(original)  # type: ignore[arg-type]


@cache
def _outside(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__call__": outside_graphs(kind.__call__)})


def _real(value: Any) -> Any:
    return torch.view_as_real(value) if isinstance(value, torch.Tensor) and value.is_complex() else value
