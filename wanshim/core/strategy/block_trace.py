"""The memory of one block while it is computed again and differentiated: its own code, run on shapes alone.

The block runs on the meta device, forward and backward, and the bytes of every tensor are counted from its birth to
its death. No table of a model's intermediate tensors has to be kept up to date, and what a change of the block saves
(chunks, a fused norm) is seen by running it.

Attention is counted as a flash kernel needs it (Dao 2023, arXiv:2307.08691): queries, keys, values, output and one
fp32 number a row are kept, and backward gathers the queries' gradient in fp32.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from wanshim.core.shared.graphs import without_compiler


@dataclass(frozen=True)
class Working:
    """Bytes on top of a block's inputs and parameters.

    Args:
        kept: for backward.
        peak: which includes it.
        attention, attention_sums: the outputs of self-attention and their log-sum-exp, which are kept too.
    """

    kept: int
    peak: int
    peak_at: str
    attention: int = 0
    attention_sums: int = 0


def trace_block(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Working:
    """Run `block` forward and backward with these inputs, on the meta device.

    Args:
        block: its parameters may lie anywhere; they are read for shape and dtype alone. A quantised weight counts in
            the dtype it is computed in.
        args, kwargs: tensors of any device, of which only shape and dtype count; what else a block is called with it
            gets as it is. The first tensor is the activation that gradients flow to; the output's gradient counts as
            one of the block's own tensors.

    Raises:
        whatever the block raises on meta tensors, such as a kernel that knows none.
    """
    both = _ForwardAndBackward(block)
    with torch.no_grad():
        state = {name: _shape_of(p).requires_grad_(p.requires_grad) for name, p in both.named_parameters()}
        state |= {name: _shape_of(b) for name, b in both.named_buffers()}
        placed = tree_map(lambda v: _shape_of(v) if isinstance(v, torch.Tensor) else v, (args, dict(kwargs or {})))
    activation = next(leaf for leaf in tree_leaves(placed) if isinstance(leaf, torch.Tensor))
    activation.requires_grad_(True)
    counter = _Counter([*state.values(), *(t for t in tree_leaves(placed) if isinstance(t, torch.Tensor))])
    shapes = _FlashShapes()
    with without_compiler(), shapes, counter, torch.enable_grad():
        kept = torch.func.functional_call(both, state, (counter, *placed[0]), placed[1])
    return Working(kept, counter.peak, counter.peak_at, shapes.outputs, shapes.sums)


def trace_forward(
    function: Callable[..., Any], models: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int:
    """The peak bytes of tensors that a forward without gradients makes, its inputs not counted; on the meta device.

    It runs a copy of the models, without their elements: a model may keep tensors of a forward, or move its own.

    Args:
        function: the forward: one of the models, or a function that is given them.
        models: whose parameters it uses.

    Raises:
        whatever it raises on meta tensors, such as a kernel that knows none, or on a copy.
    """
    given = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    held = [t for model in models.values() for t in (*model.parameters(), *model.buffers())]
    shapes = {
        id(t): nn.Parameter(_shape_of(t), False) if isinstance(t, nn.Parameter) else _shape_of(t)
        for t in [*given, *held]
    }
    function, args, kwargs = copy.deepcopy((function, args, dict(kwargs)), dict(shapes))
    counter = _Counter(shapes.values())
    with without_compiler(), _FlashShapes(), counter, torch.no_grad():
        function(*args, **kwargs)
    return counter.peak


class _ForwardAndBackward(nn.Module):
    """Both in one call, so that what backward computes again finds the same parameters in place."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, counter: _Counter, *args: Any, **kwargs: Any) -> int:
        output = self.block(*args, **kwargs)
        kept = counter.now
        torch.autograd.backward(output, torch.ones_like(output))
        return kept


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _Counter(TorchDispatchMode):
    """Live bytes of storages that operators make.

    What an operator makes of certain shapes is computed once: in Python it takes longer than all else here, and a
    model's blocks are alike.
    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.peak_at = "nothing"
        self._live: dict[int, int] = {}
        self._made: dict[Any, Callable[[], Any]] = {}
        for tensor in given:
            self._live[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        key: Any
        try:
            key = func, _described(args), _described(tuple((kwargs or {}).items()))
            again = self._made.get(key)
        except TypeError:  # what cannot be described
            key = again = None
        result = func(*args, **(kwargs or {})) if again is None else again()
        if again is None and key is not None and _is_new(result, args, kwargs):
            self._made[key] = _maker(result)
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, str(func)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)


def _described(value: Any) -> Any:
    """The part of an operator's argument that decides the shape of its results.

    Raises:
        TypeError: it has no hash, or elements, which may decide as well: those of a mask on the CPU.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise TypeError("a tensor with elements")
        return type(value), value.dtype, value.device, value.shape, value.stride()
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    hash(value)
    return type(value), value  # 1 and 1.0 and True are equal, and promote differently


def _is_new(result: Any, *given: Any) -> bool:
    """Whether it is one tensor on the meta device, or several, which have each a memory of its own and all of it."""
    tensors = (result,) if isinstance(result, torch.Tensor) else result
    if not isinstance(tensors, tuple) or not all(type(tensor) is torch.Tensor and tensor.is_meta for tensor in tensors):
        return False
    others = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, torch.Tensor)}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    again = [_empty_like(tensor)().untyped_storage().nbytes() for tensor in tensors]
    return list(storages.values()) == again and storages.keys().isdisjoint(others)


def _maker(result: Any) -> Callable[[], Any]:
    if isinstance(result, torch.Tensor):
        return _empty_like(result)
    makers = [_empty_like(tensor) for tensor in result]
    return lambda: tuple(make() for make in makers)


def _empty_like(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _FlashShapes(TorchFunctionMode):
    """Attention of meta tensors as a flash kernel would hold them, in place of the whole score matrix.

    `outputs` and `sums` are the bytes of all self-attentions that ran, and of their log-sum-exp.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs = self.sums = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            given = (*args, *((kwargs or {})[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            if given[0].is_meta:
                query, key, _ = given
                if query.shape == key.shape:
                    self.outputs += query.nbytes
                    self.sums += query[..., 0].numel() * torch.float32.itemsize
                return _Flash.apply(*given)
        return func(*args, **(kwargs or {}))


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, output, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        gathered = torch.empty_like(q, dtype=torch.float32)
        result = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del gathered
        return result
