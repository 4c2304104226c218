"""The kernel's digests are those of `digest.py`. Triton's interpreter runs it; tests/gpu/generation compiles it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from wanshim.core.shared.digest import digests
from wanshim.core.shared.digest_kernel import digests_by_kernel

PROGRAM = """
import torch
from wanshim.core.shared import digest, digest_kernel
digest.BLOCK = digest_kernel.BLOCK = 2**16  # words: several within each of the larger tensors
generator = torch.Generator().manual_seed(0)
made = [
    (torch.randn(size, generator=generator) * 10).to(dtype)
    for size in (2, 1000, 2**16 + 2, 150_000)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
]
made = [tensor for tensor in made if digest_kernel._has_words(tensor)]
assert len(made) == 14
assert digest_kernel.sums(made) == digest.digests(made)
changed = [tensor.clone() for tensor in made]
for tensor in changed:
    tensor[-1] = 3
assert all(a != b for a, b in zip(digest_kernel.sums(made), digest_kernel.sums(changed), strict=True))
print("equal")
"""


def test_kernel_sums_up_what_the_operators_do() -> None:
    pytest.importorskip("triton", reason="this torch comes without Triton")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout == "equal\n", done.stderr


def test_tensors_off_gpus_are_left_to_the_operators() -> None:
    made = [torch.arange(7.0), torch.arange(8.0)[1:], torch.empty(0), torch.arange(9).to(torch.uint8)]
    assert digests_by_kernel(made) == digests(made)
    assert digests_by_kernel([]) == []
