"""Self-attention that gradient checkpointing does not compute again.

Attention is a quarter to a half of a video transformer's forward, and its output and log-sum-exp are small beside what
it takes to compute them. Here a checkpointed block keeps both; recomputation makes queries, keys and values again, and
where it comes to the attention kernel it takes what was kept. Cross-attention, over a short text, is computed again.

Method: selective activation checkpointing (Korthikanti et al. 2022, arXiv:2205.05198), by operator, below autograd.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.library import Library
from torch.utils._pytree import tree_flatten, tree_unflatten

from wanshim.core.offload import CheckpointOffload
from wanshim.errors import WanshimError

# The forward operators of attention: queries and keys come first, and the first result is the output.
KERNELS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flash_attn::_flash_attn_forward",  # flash-attn, since 2.7
        "flash_attn_3::fwd",
        "flash_attn_3::_flash_attn_forward",
        "xformers_flash::flash_fwd",
        "xformers_flash3::flash_fwd",
        "xformers::efficient_attention_forward_cutlass",
    }
)


@dataclass
class KeptCount:
    """Counts since the start. Bytes are those of all that was kept, on the device and on the host."""

    kept: int = 0
    kept_bytes: int = 0
    reused: int = 0


class KeptAttention:
    """Keeps self-attention's results from a block's forward for its recomputation.

    `checkpoint(block, x, use_reentrant=False, context_fn=kept.contexts)`. Loss and gradients are those of plain
    checkpointing, bit for bit, with deterministic kernels. Safe to use from several threads, and for a graph that has
    more than one backward. `remove()` ends it; what is still to be recomputed then computes its attention.

    An attention is kept if queries and keys have one shape and its kernel is one of `KERNELS`.

    Args:
        offload: the outputs wait in host memory, through this and nothing else; the log-sum-exp, 4 bytes a token and
            head, stays on the device. Default: both stay.
    """

    def __init__(self, offload: CheckpointOffload | None = None) -> None:
        self.offload = offload
        self.count = KeptCount()
        self.lock = threading.Lock()  # of `count`
        _INTERCEPTION.hold()
        self.remove = weakref.finalize(self, _INTERCEPTION.release)
        self.remove.atexit = False

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For one checkpointed call: a context for its forward, and one for each recomputation."""
        kept: list[_Kept] = []
        return _Context(self, kept, recomputes=False), _Context(self, kept, recomputes=True)


class _Kept:
    """The results of one call of a kernel."""

    def __init__(self, operator: Any, results: Any, offload: CheckpointOffload | None) -> None:
        self.operator = operator
        self.shape = tuple(_output(results).shape)
        self._offload = offload
        leaves, self._structure = tree_flatten(results)
        self.num_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        self._leaves = [_apart(leaf) for leaf in leaves]
        self._versions = [_version(leaf) for leaf in leaves]
        if offload is not None:
            self._leaves[0], self._versions[0] = offload.pack(self._leaves[0]), None

    def results(self) -> Any:
        """As the kernel gave them, in tensors that autograd has not seen yet.

        Raises:
            WanshimError: one of them was written to.
        """
        pairs = zip(self._leaves, self._versions, strict=True)
        if any(known is not None and _version(leaf) != known for leaf, known in pairs):
            raise WanshimError(
                f"an attention output of shape {self.shape} was written to after it had been kept",
                expected="blocks that leave it as it is",
                topic="keep_off",
            )
        leaves = list(self._leaves)
        if self._offload is not None:
            leaves[0] = self._offload.unpack(leaves[0])
        return tree_unflatten([_apart(leaf) for leaf in leaves], self._structure)


class _Context:
    """Entered around a block, in its forward or in a recomputation; the kernels that run within it, on this thread,
    come here."""

    def __init__(self, owner: KeptAttention, kept: list[_Kept], *, recomputes: bool) -> None:
        self._owner, self._kept, self._recomputes = owner, kept, recomputes
        self._next = 0  # of `kept`, in a recomputation
        self._outer: _Context | None = None

    def __enter__(self) -> None:
        self._next = 0
        self._outer, _ACTIVE.context = getattr(_ACTIVE, "context", None), self

    def __exit__(self, *error: object) -> None:
        self._outer, _ACTIVE.context = None, self._outer

    def attend(self, operator: Any, compute: Callable[[], Any]) -> Any:
        """The results of a self-attention kernel, which `compute` runs."""
        owner = self._owner
        if not self._recomputes:
            results = compute()
            self._kept.append(kept := _Kept(operator, results, owner.offload))
            with owner.lock:
                owner.count.kept += 1
                owner.count.kept_bytes += kept.num_bytes
            return results
        found = self._kept[self._next] if self._next < len(self._kept) else None
        self._next += 1
        if found is None or found.operator is not operator:
            raise WanshimError(
                f"a block is computed again with {operator} as attention {self._next}",
                expected=f"{found.operator if found is not None else 'no further attention'}, as in its forward",
                topic="keep_off",
            )
        with owner.lock:
            owner.count.reused += 1
        return found.results()


class _Interception:
    """Every call of a kernel comes here first, while somebody holds this; no other operator passes through Python.

    The kernels are overridden at `BackendSelect`, a dispatch key that every call passes below autograd and above the
    device's implementation.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._libraries: list[Library] = []

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            for name in sorted(KERNELS):
                namespace, _, kernel = name.partition("::")
                packet = getattr(getattr(torch.ops, namespace), kernel, None)
                for overload in packet.overloads() if packet is not None else ():
                    library = Library(namespace, "IMPL")
                    operator = getattr(packet, overload)
                    library.impl(operator, partial(_intercepted, operator), "BackendSelect", with_keyset=True)
                    self._libraries.append(library)

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._libraries.clear()  # a library's end takes back what it registered


def _intercepted(operator: Any, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    def compute() -> Any:
        return operator.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *args, **kwargs)

    context: _Context | None = getattr(_ACTIVE, "context", None)
    return compute() if context is None or not _is_self_attention(args) else context.attend(operator, compute)


_ACTIVE = threading.local()  # .context: the innermost that this thread is in
_INTERCEPTION = _Interception()


def _is_self_attention(args: tuple[Any, ...]) -> bool:
    """Whether a kernel's queries and keys have one shape. What a compiler traces is no tensor of its own."""
    query, key = args[:2]
    return type(query) is torch.Tensor and query.shape == key.shape


def _output(results: Any) -> torch.Tensor:
    return results[0] if isinstance(results, (tuple, list)) else results


def _apart(leaf: Any) -> Any:
    """The same memory and version in a tensor of its own: autograd makes a kernel's result part of its graph, which
    would then hold itself."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach()


def _version(leaf: Any) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) else None
