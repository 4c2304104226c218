"""The forward of a transformer that generates: while it runs, its blocks are compiled and multiply in eight bits.

Everything is attached when a forward begins and taken off when it ends. So a LoRA that is loaded, scaled or fused, an
offload and a swapped module are seen as they are then, and the program finds its models as it made them.

The first forward of a size is computed by the framework's own blocks too: the distance of the two results is known.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from wanshim.core.compile import CompiledBlocks, compiler_refusal, graph_limits
from wanshim.core.eight_bit import compute_in_eight_bits, refusal, takes_eight_bits
from wanshim.core.shared.fallback import Fallback
from wanshim.core.shared.plain import is_compiled, seen_by, why_not_plain
from wanshim.core.shared.recent import Recent
from wanshim.core.workers.process import is_worker
from wanshim.errors import FeatureUnavailable
from wanshim.undo import Undo

T = TypeVar("T")
FEW_LATENTS = 16  # of a frame, by which copies of a model are compared: not worth a graph
_HERE = threading.local()  # `run`: whose forward this thread computes


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The request of the user.

    Args:
        compute: the format of products; None: the weights' own.
        compiles: blocks are compiled.
        strict: names of those two that must not be left out.
    """

    compute: str | None
    compiles: bool
    strict: frozenset[str] = frozenset()


def compiling() -> FastForward | None:
    """Whose forward this thread computes with compiled blocks; None: nobody's."""
    run: FastForward | None = getattr(_HERE, "run", None)
    return run if run is not None and run.compiles else None


class FastForward:
    """The forwards of one class of transformers.

    Args:
        note: takes a sentence for the user.
        close: takes what the report says of all forwards at the end.
    """

    def __init__(self, note: Callable[[str], None], close: Callable[[str], None]) -> None:
        self._note, self._close = note, close
        self._said: set[str] = set()
        self._sizes: WeakKeyDictionary[nn.Module, Recent[tuple[Any, ...], None]] = WeakKeyDictionary()
        self._distances: list[float] = []
        self._seconds = 0.0  # of compilation, that a line has said
        self._graphs: dict[bool, CompiledBlocks] = {}
        self._options = Options(compute=None, compiles=False)
        self.compiles = False  # in the forward now

    def serves(self, given: Any) -> bool:
        """Whether a forward of these arguments is one of generation: without gradients, of more than a few tokens."""
        tensors = _tensors(given)
        return (
            getattr(_HERE, "run", None) is None
            and bool(tensors)
            and not torch.is_grad_enabled()
            and seen_by() is None
            and not any(each.is_meta for each in tensors)
            and math.prod(_latents(tensors).shape[-3:]) > FEW_LATENTS
        )

    def run(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        options: Options,
        given: Any,
        compute: Callable[[], T],
        exact: Callable[[], T] | str,
    ) -> T:
        """`compute()`, the forward of `model`, faster.

        Args:
            given: the arguments, by which sizes differ.
            exact: computes it by the framework's own blocks, whatever hooks keep of a forward left alone; or why it
                cannot.

        Raises:
            Fallback: nothing of it can be faster.
        """
        self._options = options
        device = _latents(_tensors(given)).device
        format, compiles = self._available(model, blocks, device)
        expected = self._exact(model, blocks, given, exact)
        with Undo() as undo:
            if format is not None:
                compute_in_eight_bits(blocks, format, undo)
            with self._here(compiles):
                result = compute()
        if expected is not None:
            self._measure(model, given, expected, result)
        return result

    def block(self, forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`forward(block, *args, **kwargs)`, compiled.

        Raises:
            Fallback: it is not; the text says why.
        """
        if not args:
            raise Fallback("a block is called with its tokens by name")
        reason = _why_not_one_graph(block)
        if reason:
            raise Fallback(reason)
        return self._compiled().compiled(type(block), forward)(block, *args, **kwargs)

    @contextmanager
    def _here(self, compiles: bool) -> Iterator[None]:
        _HERE.run, self.compiles = self, compiles
        try:
            with graph_limits():
                yield
        finally:
            _HERE.run, self.compiles = None, False

    def _compiled(self) -> CompiledBlocks:
        strict = "compile" in self._options.strict
        if strict not in self._graphs:
            with Undo() as nothing:
                left = None if strict else partial(self._left, "blocks are not compiled")
                self._graphs[strict] = CompiledBlocks((), nothing, alike=True, on_fallback=left)
        return self._graphs[strict]

    def _left(self, what: str, why: str) -> None:
        sentence = f"left out: {what}: {why}"
        if sentence not in self._said:
            self._said.add(sentence)
            self._note(sentence)

    def _available(
        self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device
    ) -> tuple[str | None, bool]:
        """The format of products and whether blocks are compiled, of what is asked for."""
        if is_compiled(model):
            raise Fallback("the program has compiled it")
        reason = _why_quantized(blocks)
        if reason:
            raise Fallback(reason)
        format, compiles = self._options.compute, self._options.compiles
        reasons = []
        if format is not None:
            why = _refused(format, device)
            if why is None and not takes_eight_bits(blocks, format):
                why = f"no Linear of its blocks can multiply in {format}"
            if why is not None:
                self._left_out("compute", "no Linear multiplies in eight bits", why)
                format = None
                reasons.append(why)
        if compiles and (why := compiler_refusal(device)) is not None:
            self._left_out("compile", "blocks are not compiled", why)
            compiles = False
            reasons.append(why)
        if format is None and not compiles:
            raise Fallback(
                "; ".join(dict.fromkeys(reasons)) or "neither compiled blocks nor products in eight bits are on"
            )
        return format, compiles

    def _left_out(self, field: str, what: str, why: str) -> None:
        if field in self._options.strict:
            raise FeatureUnavailable(f"{what}: {why}", hint="Change that, or run without strict")
        self._left(what, why)

    def _exact(
        self, model: nn.Module, blocks: Sequence[nn.Module], given: Any, exact: Callable[[], T] | str
    ) -> T | None:
        """The framework's result of the first forward of a size; None: it is not the first, or is not to be computed.

        A worker's forward is measured by none: the program's process has measured the same.
        """
        sizes = tuple((t.shape, t.dtype, t.device) for t in _tensors(given))
        known = self._sizes.setdefault(model, Recent(64))
        if sizes in known or is_worker():
            return None
        why = exact if isinstance(exact, str) else _why_once(model, blocks)
        known[sizes] = None
        if why:
            self._note(f"{type(model).__name__}: the distance from the exact forward is not measured: {why}")
            return None
        assert not isinstance(exact, str)
        return exact()

    def _measure(self, model: nn.Module, given: Any, expected: Any, result: Any) -> None:
        off = _distance(expected, result)
        size = "x".join(map(str, _latents(_tensors(given)).shape))
        seconds = sum(each.count.seconds for each in self._graphs.values())
        spent, self._seconds = seconds - self._seconds, seconds
        compiled = f"; its blocks were compiled in {spent:.1f} s" if spent else ""
        self._note(f"{type(model).__name__} of {size}: the first forward is {off:.2%} off the exact one{compiled}")
        self._distances.append(off)
        least, most = min(self._distances), max(self._distances)
        between = " to ".join(dict.fromkeys((f"{least:.2%}", f"{most:.2%}")))
        self._close(f"first forwards {between} off the exact ones")


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _latents(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those of a video, (b, c, f, h, w), or the first tensor."""
    return next((each for each in tensors if each.ndim == 5), tensors[0])


_refused = cache(refusal)


def _why_quantized(blocks: Sequence[nn.Module]) -> str:
    for block in blocks:
        for parameter in block.parameters():
            if type(parameter) is not nn.Parameter or parameter.dtype.itemsize == 1:
                return f"its weights are quantized ({type(parameter).__name__}, {parameter.dtype})"
    return ""


def _why_not_one_graph(block: nn.Module) -> str:
    """Why a block cannot be a graph, by what is in it: hooks around it run around the graph; empty if it can."""
    parts = (module for module in block.modules() if module is not block)
    found = why_not_plain(parts)
    if found is None:
        return ""
    module, reason = found
    if module is not None and any(_is_ours(hook) for hook in _hooks(module)):
        return "its tokens go over GPUs, which exchange them inside the block: its blocks are not compiled"
    path = next((path for path, each in block.named_modules() if each is module), "")
    return f"{path} of its blocks {reason}: they are not compiled" if module is not None else reason


def _why_once(model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Why a forward must not run twice; empty if it may."""
    for block in blocks:
        for module in block.modules():
            if module is not block and any(map(_is_ours, _hooks(module))):
                return "its tokens go over GPUs"
    if any(not _is_ours(hook) for module in model.modules() for hook in _hooks(module)):
        return "the program has forward hooks in it"
    return ""


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("wanshim.")


def _distance(expected: Any, result: Any) -> float:
    """Distance of two results: the norm of their difference as a share of the first's."""
    pairs = zip(tree_leaves(expected), tree_leaves(result), strict=True)
    floats = [(a.double(), b.double()) for a, b in pairs if isinstance(a, torch.Tensor)]
    difference = sum((a - b).square().sum() for a, b in floats)
    whole = sum(a.square().sum() for a, _ in floats)
    return float((difference / whole).sqrt()) if float(whole) else 0.0
