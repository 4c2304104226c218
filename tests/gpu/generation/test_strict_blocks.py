"""Blocks of Wan and Qwen-Image transformers by kernels on a GPU: the framework's bits, no kernel is found to differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wanshim
from wanshim.core.shared.kernel_compiler import COMPILER

pytestmark = pytest.mark.gpu(1)
SIZES = {"one": (1, 3, 34, 46), "two": (2, 2, 20, 28), "a time for each token": (1, 2, 16, 24)}
PICTURES = {"a picture": (1, 34, 46), "two pictures": (2, 20, 28)}


@pytest.fixture(scope="module")
def forwards() -> Iterator[Any]:
    """It has how each framework's model is made and called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        import strict_blocks

        yield strict_blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("framework", "size"),
    [("diffusers", size) for size in SIZES]
    + [("diffsynth", "one"), ("diffsynth", "two")]  # has one time for all
    + [("qwen_image", size) for size in PICTURES],
)
def test_forward_has_the_framework_s_bits(framework: str, dtype: torch.dtype, size: str, forwards: Any) -> None:
    feature = forwards.feature_of(framework)
    pytest.importorskip(feature.split(".")[0])
    make = forwards.FRAMEWORKS[framework]("small", dtype, torch.device("cuda"))
    forward = make((SIZES | PICTURES)[size], "each token" in size)
    with torch.no_grad():
        expected = forward()
        wanshim.activate(feature)
        try:
            for _ in range(5):
                assert torch.equal(forward(), expected)
                COMPILER.wait()  # beside the first, which is the framework's
            row = wanshim.report().row(feature)
        finally:
            wanshim.deactivate()
    assert (row.state, row.fallbacks, row.notes) == ("exercised", {}, ())
