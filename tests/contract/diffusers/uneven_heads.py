"""Transformers whose heads do not divide over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def five_heads_on_one_thread(transformer: dict[str, Any]) -> Iterator[pytest.MonkeyPatch]:
    """Args: transformer: the configuration that is changed meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transformer, "num_attention_heads", 5)
        yield patch
    torch.set_num_threads(before)
