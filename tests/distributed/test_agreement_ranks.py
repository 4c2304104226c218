from __future__ import annotations

import time

import torch.distributed as dist

from tests.distributed.decoding.ranks import run_ranks, values
from wanshim.core.ranks import agreement
from wanshim.errors import RankDisagreement


def meet(rank: int, size: int, features: list[str]) -> tuple[str, float]:
    """What the rank met, and the seconds that it took."""
    fingerprint = {"wanshim": "0.1.0", "features": {"torch.pg_timeout": features[rank]}, "host": f"node-{rank}"}
    agreement.set_fingerprint_provider(lambda: fingerprint)
    started = time.monotonic()
    try:
        agreement.ensure(call="decode")
        if rank == 0:  # nobody else: ranks that have agreed wait for each other no more
            agreement.ensure(call="decode", timeout_s=1.0)
        met = "agreed"
    except RankDisagreement as error:
        met = str(error)
    seconds = time.monotonic() - started
    dist.barrier()  # a rank's connections end with it
    return met, seconds


def test_ranks_with_one_patch_set_agree() -> None:
    assert [met for met, _ in values(run_ranks(meet, 2, ["ab", "ab"]))] == ["agreed", "agreed"]


def test_ranks_with_two_patch_sets_raise_the_same_table_within_30_s() -> None:
    (first, one), (second, other) = values(run_ranks(meet, 2, ["ab", "cd"]))
    assert first == second
    assert "different patch sets" in first
    assert "node-0" in first
    assert "node-1" in first
    assert max(one, other) < 30
