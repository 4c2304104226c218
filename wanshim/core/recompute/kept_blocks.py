"""Blocks that gradient checkpointing does not compute again: what autograd saves of them stays on the device.

Checkpointing trades time for memory in every block alike. Where memory is left, the last blocks can do without: their
backward comes first, so that all they keep is free again before an earlier block is computed again.

Method: checkpointing of some layers, others as they are (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

# What `torch.utils.checkpoint.checkpoint` takes for itself.
OPTIONS = frozenset({"use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop"})
_EMPTY_CELL = CellType()  # of a name that has no value yet: it has no contents to look at


class KeptBlocks:
    """Calls these blocks as they are where a framework would checkpoint them. Loss and gradients are the same.

    `around(checkpoint)` takes the place of `torch.utils.checkpoint.checkpoint`. A block is found in the function that
    is checkpointed: the module itself, a method of it, or a function that closes over it. Safe to use from several
    threads.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.blocks = tuple(blocks)
        self.calls = 0
        self._lock = threading.Lock()

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """`checkpoint` for every other block."""

        def checkpoint_others(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self._holds(function):
                return checkpoint(function, *args, **kwargs)
            with self._lock:
                self.calls += 1
            return function(*args, **{name: value for name, value in kwargs.items() if name not in OPTIONS})

        return checkpoint_others

    def _holds(self, function: Callable[..., Any]) -> bool:
        candidates: list[Any] = [function]
        if isinstance(function, MethodType):
            candidates.append(function.__self__)
        elif isinstance(function, FunctionType):
            candidates.extend(cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY_CELL)
        return any(one is block for one in candidates for block in self.blocks)
