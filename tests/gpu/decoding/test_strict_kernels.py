"""Strict on one GPU: diffusers' bits in fewer passes."""

from __future__ import annotations

import pytest
import torch

from wanshim.core.decoding import parallelize_decode
from wanshim.core.decoding.operators.strict_checks import Sizes

from .everything import on_gpu


@pytest.mark.gpu(1)
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_strict_on_one_gpu_has_the_bits_of_diffusers_with_norms_in_one_kernel(layout: str, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    vae, latent = on_gpu(layout, dtype, 5)
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    for _ in range(2):
        assert torch.equal(vae.decode(latent).sample, reference)
    checks = handle.parallel._checks
    handle.remove()
    assert set(checks._norms.values()) == {Sizes.WIDE}
    assert checks.silu(dtype) == (dtype == torch.bfloat16)
