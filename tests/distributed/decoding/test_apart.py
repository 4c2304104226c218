"""Data-parallel decodes and encodes: ranks that hold different samples or VAEs, and not equally many of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

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


def _own_vae(rank: int, size: int, what: str) -> list[str]:
    """A VAE of its own on each rank, as where checkpoints are compared; the second call waits for nobody."""
    vae = make_vae("2.1", seed=rank if what == "weights" else 0)
    vae = vae.to(torch.bfloat16 if what == "dtype" and rank else torch.float32)
    cache = VaeCache(partial(read_graph, verb="decode"))
    latent, options, lean = make_latent(2).to(vae.dtype), VaeOptions(deadline=30.0), what == "lean" and rank == 1
    reasons = []
    for _ in range(2 - rank):
        with pytest.raises(VaeFallback) as left:
            cache.run(vae, latent, options, lean=lean)
        reasons.append(str(left.value))
    return reasons


@pytest.mark.parametrize(
    ("what", "differing"),
    [("weights", "weights"), ("dtype", "compute, dtype, weights"), ("lean", "lean")],
)
def test_ranks_that_have_each_a_vae_of_its_own_compute_by_themselves(what: str, differing: str) -> None:
    for rank, reasons in enumerate(values(run_ranks(_own_vae, 2, what))):
        assert reasons == (2 - rank) * [f"the ranks decode with different {differing}"]


def _crossed(rank: int, size: int) -> None:
    """Two VAEs, which each rank calls in an order of its own, as from threads."""
    cache, latent = VaeCache(partial(read_graph, verb="decode")), make_latent(2)
    vaes = [make_vae("2.1", seed=seed) for seed in range(2)]
    for number in ((1, 1), (0, 1))[rank]:
        with pytest.raises(VaeFallback, match="with different weights"):
            cache.run(vaes[number], latent, VaeOptions(deadline=3.0))


def test_rank_that_calls_two_vaes_in_another_order_waits_for_nobody() -> None:
    values(run_ranks(_crossed, 2))


@pytest.mark.parametrize(("verb", "reason"), [("decode", "different latents"), ("encode", "different videos")])
def test_rank_with_one_sample_more_computes_it_alone(verb: str, reason: str) -> None:
    for rank, reasons in enumerate(values(run_ranks(_odd, 2, verb))):
        assert reasons == (2 - rank) * [f"the ranks {verb} {reason}"]
