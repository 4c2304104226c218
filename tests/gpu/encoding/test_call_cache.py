"""Results of calls read for a GPU that still computes the step before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wanshim.core.encoding.call_cache import CallCache


@pytest.mark.gpu(1)
def test_result_is_read_without_a_wait_for_the_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    cache = CallCache(tmp_path / "cache")
    made = torch.randn(64, 1024, device=device, dtype=torch.bfloat16)

    def result() -> torch.Tensor:
        found = cache.result("encode", lambda: "model", lambda prompt: {"latents": made}, {"prompt": "a cat"}, device)
        latents: torch.Tensor = found["latents"]
        return latents

    result()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = result()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert dict(cache.counts) == {"computed": 1, "read": 1}
    assert found is not made
    assert torch.equal(found, made)
