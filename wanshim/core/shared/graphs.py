"""Functions that `torch.compile` leaves as they are: in the middle of what it compiles, or run on shapes alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

OUTSIDE = "this runs outside of graphs"  # as torch names the break


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with all that it calls, as a part that no graph has in it."""
    from torch import _dynamo  # which torch's own optimizers import

    return _dynamo.disable(function, reason=OUTSIDE)  # type: ignore[no-any-return, no-untyped-call]


def without_compiler() -> AbstractContextManager[Any]:
    """Whatever the program has compiled runs as it is written. On meta tensors and under a mode of torch's it would be
    compiled for them, and in torch 2.11 never again for the program's own calls."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
