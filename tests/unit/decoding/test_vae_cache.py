"""A decode with nobody to share it with: on the CPU it stays with the framework, on CUDA it is a group of one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers a group whose other ranks are not there
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.distributed.decoding.tiny import make_latent, make_vae
from tests.forked_child import in_forked_child
from wanshim.core.decoding import Graph, call, read_graph, vae_cache
from wanshim.errors import RankAbsent


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


def test_decode_in_a_child_that_a_rank_has_forked_says_so() -> None:
    """As in a worker of a DataLoader."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        assert in_forked_child(reason) == "this process was forked from a rank: it is none itself"
    finally:
        dist.destroy_process_group()


def test_rank_that_stayed_away_is_waited_for_a_short_time_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script that decodes on one rank alone, which would wait for the deadline in each call."""
    monkeypatch.setattr(call, "AFTER_ABSENCE", 0.05)
    vae, cache = make_vae("2.1"), vae_cache.VaeCache(read_graph)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=20))
    try:
        for seconds in ("0.5", "0.05", "0.05"):
            with torch.no_grad(), pytest.raises(RankAbsent, match=f"rank 1 did not call decode within {seconds} s"):
                cache.run(vae, make_latent(2), vae_cache.VaeOptions(deadline=0.5))
    finally:
        dist.destroy_process_group()


def test_one_process_is_a_group_of_one_where_that_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, for which the CPU stands in here; tests/gpu/roads has the GPU."""
    monkeypatch.setattr(vae_cache, "gains_alone", lambda given: True)
    vae, latent = make_vae("2.1"), make_latent(2, batch=2)
    with torch.no_grad():
        expected = vae.decode(latent).sample
        cache = vae_cache.VaeCache(read_graph)
        assert torch.equal(cache.run(vae, latent, vae_cache.VaeOptions()).clamp(-1, 1), expected)
    assert cache.plan is not None
    assert cache.plan.mode == "single"


def test_threads_that_come_first_at_once_share_one_decoder() -> None:
    """As two requests to a service that has just started: decoders of their own would compute at once with one VAE."""
    both = threading.Barrier(2)

    def read(vae: Any) -> Graph:
        both.wait(60)
        return read_graph(vae)

    cache, vae = vae_cache.VaeCache(read), make_vae("2.1")
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: cache._of(vae, None, vae_cache.VaeOptions()), range(2))
    assert first is second


def test_gain_of_one_process_is_that_of_the_operators_for_cuda() -> None:
    assert not vae_cache.gains_alone(torch.zeros(1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert vae_cache.gains_alone(torch.zeros(1, device="cuda:0"))
