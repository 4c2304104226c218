"""Fast blocks on the CPU: their switches, and the distance of what they compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import wanshim
from tests.compiling import use_aot_eager


def int8_by_eager_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The body of a fixture: int8, which every CPU multiplies, and graphs that eager's kernels run."""
    monkeypatch.setenv("WANSHIM_COMPUTE", "int8")
    use_aot_eager(monkeypatch)
    torch._dynamo.reset()
    yield
    wanshim.deactivate()


def activate(monkeypatch: pytest.MonkeyPatch, gpus: str = "1", **variables: str) -> None:
    for name, value in {"GENERATE": gpus, "FAST": "1", "VAE_FAST": "0", **variables}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
