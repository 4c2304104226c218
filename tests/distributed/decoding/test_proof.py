"""Ranks agree on what a comparison with the framework's own finds: a fault on one of them reaches no user."""

from __future__ import annotations

import pytest
import torch

from wanshim.core.decoding import parallelize_decode

from .faults import FAULTS, Told, Uncompared, calls, compiles, uncompared
from .ranks import run_ranks, values
from .tiny import make_latent, make_vae

pytestmark = pytest.mark.slow  # each test is a set of ranks


@pytest.fixture(scope="module")
def told() -> list[Told]:
    found: list[Told] = values(run_ranks(calls, 3, seconds=280))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_has_the_framework_s_result_and_the_same_sentence(fault: str, told: list[Told]) -> None:
    for rank in told:
        assert rank[fault] == told[0][fault]
        assert [equal for equal, *_ in rank[fault]] == [True, True]


def test_equal_ranks_share_the_call_and_say_that_it_was_compared(told: list[Told]) -> None:
    assert told[0]["none"] == 2 * [(True, "strict, compared", "")]


@pytest.mark.parametrize("fault", FAULTS[1:3])
def test_fault_is_found_and_named(fault: str, told: list[Told]) -> None:
    for (_, _, reason), source in zip(told[0][fault], ("latent", "video")):
        assert reason.startswith(f"strict was not equal for a {source} of [")


def test_hook_on_one_rank_leaves_the_call_to_the_framework_on_all(told: list[Told]) -> None:
    decode, encode_ = told[1]["framework of the last rank"]
    assert decode == (True, "strict, not compared", "decoder has forward hooks")
    assert encode_ == (True, "strict, not compared", "encoder has forward hooks")


def test_kernels_that_one_rank_compiles_leave_the_call_to_the_framework_on_all() -> None:
    for left, taken, reason, equal in values(run_ranks(compiles, 2)):
        assert (left, taken, equal) == (True, True, [True, True])
        assert reason.startswith("its kernels are being compiled beside it")


def laid_otherwise(rank: int, size: int) -> list[bool]:
    """The weights of one rank lie channels last."""
    vae, latent = make_vae("2.1"), make_latent(5)
    with torch.no_grad():
        expected = vae.decode(latent).sample
        for module in vae.decoder.modules() if rank else ():
            if isinstance(module, torch.nn.Conv3d):
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
        handle = parallelize_decode(vae, deadline=20)
        found = [torch.equal(vae.decode(latent).sample, expected) for _ in range(2)]
    handle.remove()
    return found


def test_ranks_whose_weights_lie_otherwise_compare_the_same_frames() -> None:
    assert values(run_ranks(laid_otherwise, 2)) == [[True, True]] * 2


def short_call_out_of_memory(rank: int, size: int) -> Uncompared:
    return uncompared(make_vae("2.1"), make_latent(6), breaks=rank == 0)


def test_short_call_out_of_memory_on_one_rank_fails_no_call_and_the_next_is_compared() -> None:
    for found in values(run_ranks(short_call_out_of_memory, 2)):
        assert found.equal == [True, True]
        assert found.claims == ["strict, not compared", "strict, compared"]
        (said,) = found.said
        assert said.startswith(
            "not compared with the framework's own: rank 0: out of memory: OutOfMemoryError: injected;"
        )
