"""The kernel's digests are those of the separate operators, whichever computes them."""

from __future__ import annotations

import pytest
import torch

from wanshim.core.shared import digest_kernel
from wanshim.core.shared.digest import digests
from wanshim.core.shared.kernel_compiler import COMPILER

pytestmark = pytest.mark.gpu(1)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [
        torch.randn(size, generator=generator, device="cuda").to(dtype)
        for size in (0, 1, 7, 1000, 2**21 + 3, 2**23 + 8)
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.bool)
    ]
    return [*made, *(tensor[1:] for tensor in made), made[-1].view(-1, 2).t(), torch.arange(5)]


def test_kernel_has_the_digests_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tensors()
    expected = digests(made)
    assert digest_kernel.digests_by_kernel(made) == expected
    COMPILER.wait()
    summed: list[int] = []
    sums = digest_kernel.sums
    monkeypatch.setattr(digest_kernel, "sums", lambda some: summed.append(len(some)) or sums(some))
    assert digest_kernel.digests_by_kernel(made) == expected
    assert summed == [24]  # of 62: the rest has no whole words, or begins within one


def test_kernel_that_fails_leaves_all_to_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tensors()
    digest_kernel.digests_by_kernel(made)
    COMPILER.wait()
    monkeypatch.setattr(digest_kernel, "_failed", set())
    monkeypatch.setattr(digest_kernel, "_launch", lambda *_: 1 / 0)
    assert digest_kernel.digests_by_kernel(made) == digests(made)
    assert digest_kernel._failed == {torch.device("cuda", 0)}
