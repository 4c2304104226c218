"""Why a decode stays with the framework, where there is nobody to share it with."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from wanshim.core.decoding import vae_cache


def reason() -> str:
    cache = vae_cache.VaeCache(lambda vae: pytest.fail("no decoder is made"))
    with pytest.raises(vae_cache.VaeFallback) as caught:
        cache.run(object(), torch.zeros(1), vae_cache.VaeOptions())
    return str(caught.value)


def test_decode_without_a_process_group_says_that_none_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, in a script that does not call init_process_group."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert reason() == "no process group: torch.distributed.init_process_group was not called in this process"


def test_decode_in_a_group_of_one_says_that_there_is_nobody_to_share_with() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        assert reason() == "one process: there is nobody to share with"
    finally:
        dist.destroy_process_group()
