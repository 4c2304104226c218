"""Contract tests run the real frameworks on tiny models."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and a busy machine makes them wait for each other."""
    import torch

    torch.set_num_threads(1)
