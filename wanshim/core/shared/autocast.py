"""The caller's autocast, for a thread that would begin without, or for a backward pass that computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch


def autocast_of_caller() -> Callable[[], AbstractContextManager[None]]:
    """A function that enters the autocast of here and now, in another thread or later."""
    states = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in states:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield

    return entered
