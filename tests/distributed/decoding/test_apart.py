"""Data-parallel decodes and encodes: ranks that hold different samples, and not equally many of them."""

from __future__ import annotations

from functools import partial

import pytest

from wanshim.core.decoding import VaeCache, VaeFallback, VaeOptions, read_graph

from .ranks import run_ranks, values
from .tiny import make_latent, make_vae, make_video


def _odd(rank: int, size: int, verb: str) -> list[str]:
    """Two samples on the first rank and one of another shape on the other."""
    vae = make_vae("2.1")
    cache = VaeCache(partial(read_graph, verb=verb), verb)
    given = {"decode": make_latent(2 + rank), "encode": make_video(5, 48, 64 + 16 * rank)}[verb]
    reasons = []
    for _ in range(2 - rank):
        with pytest.raises(VaeFallback) as left:
            cache.run(vae, given, VaeOptions(deadline=30.0))
        reasons.append(str(left.value))
    return reasons


@pytest.mark.parametrize(("verb", "reason"), [("decode", "different latents"), ("encode", "different videos")])
def test_rank_with_one_sample_more_computes_it_alone(verb: str, reason: str) -> None:
    for rank, reasons in enumerate(values(run_ranks(_odd, 2, verb))):
        assert reasons == (2 - rank) * [f"the ranks {verb} {reason}"]
