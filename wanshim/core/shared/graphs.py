"""Functions that `torch.compile` leaves as they are: in the middle of what it compiles, or run on shapes alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

OUTSIDE = "this runs outside of graphs"  # as torch names the break
# A stance is the process's: of two threads, the last one would leave the other's in place.
_one_at_a_time = threading.RLock()


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with all that it calls, as a part that no graph has in it."""
    from torch import _dynamo  # which torch's own optimizers import

    return _dynamo.disable(function, reason=OUTSIDE)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def without_compiler() -> Iterator[None]:
    """Whatever the program has compiled runs as it is written. On meta tensors and under a mode of torch's it would be
    compiled for them, and in torch 2.11 never again for the program's own calls."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _one_at_a_time, torch.compiler.set_stance("force_eager"):
        yield
