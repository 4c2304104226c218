"""Steps that fail, and what each rank says of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .tiny import Transformer

DEADLINE = 16.0


SECONDS = 1.5 * DEADLINE  # a rank that is gone is noticed in a quarter of the deadline


def outcome_of(step: Callable[[], Any]) -> tuple[str, str, float]:
    """The error's name and text, and how long it took to come."""
    start = time.monotonic()
    try:
        step()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def break_block(model: Transformer, when: int, action: Callable[[], None]) -> None:
    """Let `action` run in the middle of the `when`-th run of the second block."""
    runs = [0]

    def hook(*_: Any) -> None:
        runs[0] += 1
        if runs[0] == when:
            action()

    model.blocks[1].ffn.register_forward_pre_hook(hook)


def raise_(error: Exception) -> None:
    raise error
