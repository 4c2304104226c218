"""What of torch's settings a worker takes over, also where torch's present switch of fp32 precision was used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from wanshim.core.workers import numerics

CPU = torch.device("cpu")
SWITCHES = {
    "older": lambda: torch.set_float32_matmul_precision("high"),
    "products": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
}


@pytest.fixture(autouse=True)
def _as_torch_starts() -> Iterator[None]:
    _reset()
    yield
    _reset()


def _reset() -> None:
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("switch", SWITCHES)
def test_worker_computes_with_the_precision_of_its_parent(switch: str) -> None:
    before = numerics.read(CPU)
    SWITCHES[switch]()
    wanted = numerics.read(CPU)
    assert wanted != before
    with numerics.apply(before):
        assert numerics.read(CPU)["matmul precision"] == before["matmul precision"]
    with numerics.apply(wanted):
        assert numerics.read(CPU) == {**wanted, "inference": False}


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor always keeps denormal numbers")
def test_worker_keeps_denormal_numbers_where_its_parent_does() -> None:
    kept = numerics.read(CPU)
    assert kept["denormals"]
    torch.set_flush_denormal(True)
    try:
        assert not numerics.read(CPU)["denormals"]
        with numerics.apply(kept):
            assert numerics.read(CPU)["denormals"]
    finally:
        torch.set_flush_denormal(False)
