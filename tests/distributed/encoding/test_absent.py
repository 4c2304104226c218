"""A rank that never encodes, or never decodes through a patch, is reported as absent; its patch set is not blamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.tiny import make_latent, make_vae
from wanshim.core.decoding import VaeCache, VaeOptions, read_graph
from wanshim.core.encoding import EncodingRequest, encode_once
from wanshim.core.ranks import agreement
from wanshim.errors import RankAbsent, RankDisagreement

FINGERPRINT = {"wanshim": "0.1.0", "features": {}, "packages": {}, "host": "node"}


def play(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 stays away from the first call of each kind, and carries another patch set in the last."""
    told = {}
    for name, call in (("encode_once", encode()), ("decode", decode())):
        agreement.set_fingerprint_provider(lambda: FINGERPRINT)
        told[name] = error_of(lambda call=call: call(1.0)) if rank == 0 else ("", "")
        dist.barrier()
        told[f"{name} again"] = error_of(lambda call=call: call(20.0))
        agreement.set_fingerprint_provider(lambda: {**FINGERPRINT, "wanshim": f"0.{rank + 1}.0"})
        told[f"{name} apart"] = error_of(lambda call=call: call(20.0))
    return told


def encode() -> Any:
    request = EncodingRequest(prompt="a cat", sources=())
    embeds = {"embeds": torch.ones(1)}
    return lambda seconds: encode_once(lambda: embeds, request, device="cpu", mode="per_rank", timeout_s=seconds)


def decode() -> Any:
    vae, cache = make_vae("2.1"), VaeCache(read_graph)
    latent = make_latent(2)
    return lambda seconds: cache.run(vae, latent, VaeOptions(mode="temporal", deadline=seconds))


def error_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except (RankAbsent, RankDisagreement) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture(scope="module")
def played() -> Any:
    return values(run_ranks(play, 2))


@pytest.mark.parametrize(("name", "error"), [("encode_once", "RankAbsent"), ("decode", "RankAbsent")])
def test_rank_that_never_calls_is_absent_and_the_next_call_of_all_works(name: str, error: str, played: Any) -> None:
    kind, text = played[0][name]
    assert kind == error
    assert text.startswith(f"rank 1 did not call {name} within 1 s.")
    assert "patch set" not in text
    assert [told[f"{name} again"] for told in played] == [("", "")] * 2


@pytest.mark.parametrize("name", ["encode_once", "decode"])
def test_ranks_that_carry_different_patch_sets_meet_and_raise_one_table(name: str, played: Any) -> None:
    told = [told[f"{name} apart"] for told in played]
    assert told[0] == told[1]
    assert told[0][0] == "RankDisagreement"
    assert "0.1.0" in told[0][1]
    assert "0.2.0" in told[0][1]
