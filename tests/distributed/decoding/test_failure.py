"""Whatever befalls one rank, every rank ends with a named error inside the deadline, and a retry works."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from tests.distributed.decoding.timed import decode_and_time
from tests.distributed.sequence.faults import outcome_of, raise_
from wanshim.core.decoding import parallelize_decode, parallelize_encode, run
from wanshim.core.decoding.model.framework import Framework

from .faults import at_convolution, at_convolution_of_call, run_out_of_memory, spoil_convolutions
from .ranks import run_ranks, values
from .tiny import make_latent, make_vae

DEADLINE = 40.0  # far above what a decode takes on a machine under load: an error does not wait for it
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


def out_of_memory_on_one_rank(rank: int, size: int, mode: str, when: str) -> tuple[Any, bool]:
    vae, latent = make_vae("2.1"), make_latent(5)
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae, mode=mode, deadline=DEADLINE, raise_failures=True)
    if when == "later":
        vae.decode(latent)
    if rank == 1:
        at_convolution_of_call(handle, 20, run_out_of_memory)
    failed = decode_and_time(vae, latent)
    again = vae.decode(latent).sample
    handle.remove()
    return failed, torch.allclose(again, reference, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["later", pytest.param("first", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("mode", ["temporal", "spatial"])
def test_decode_out_of_memory_on_one_rank_fails_on_all_and_a_retry_works(mode: str, when: str) -> None:
    results = values(run_ranks(out_of_memory_on_one_rank, 3, mode, when))
    messages = {text for (_, text, _), _ in results}
    assert all(name == "RanksFailed" for (name, _, _), _ in results)
    assert all("rank 1: out of memory: OutOfMemoryError: injected" in text for text in messages)
    assert all(seconds < DEADLINE for (_, _, seconds), _ in results)
    assert all(same for _, same in results)


def out_of_memory_with_auto(rank: int, size: int) -> tuple[bool, str]:
    vae, latent = make_vae("2.1"), make_latent(13)  # long enough that one rank alone, frame by frame, needs less
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae, mode="auto", deadline=DEADLINE)
    vae.decode(latent)  # a first call is compared with the framework's own in a short one
    if rank == 0:
        at_convolution(10, run_out_of_memory)
    same = torch.equal(vae.decode(latent).sample, reference)
    assert handle.plan is not None
    return same, handle.plan.mode


@pytest.mark.slow
def test_auto_out_of_memory_on_one_rank_takes_all_to_the_next_plan() -> None:
    assert values(run_ranks(out_of_memory_with_auto, 2)) == [(True, "single"), (True, "single")]


def killed_in_the_middle(rank: int, size: int, mode: str) -> tuple[str, str, float]:
    vae, latent = make_vae("2.1"), make_latent(5)
    parallelize_decode(vae, mode=mode, deadline=DEADLINE, raise_failures=True)
    if rank == 1:
        at_convolution(20, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return decode_and_time(vae, latent)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["temporal", pytest.param("spatial", marks=pytest.mark.sweep)])
def test_decode_rank_killed_in_the_middle_fails_on_the_others_in_time(mode: str) -> None:
    outcomes = run_ranks(killed_in_the_middle, 3, mode)
    assert outcomes[1].error == "Died"
    for survivor in values([outcomes[0], outcomes[2]]):
        name, text, seconds = survivor
        assert name == "RanksFailed"
        assert "rank 1: gone" in text
        assert seconds < DEADLINE


def different_shapes(rank: int, size: int) -> tuple[str, str, bool]:
    vae = make_vae("2.1")
    handle = parallelize_decode(vae, mode="temporal", deadline=DEADLINE)
    name, text, _ = decode_and_time(vae, make_latent(5 if rank else 4))
    latent = make_latent(2)
    mine = vae.decode(latent).sample
    handle.remove()
    return name, text, torch.equal(mine, vae.decode(latent).sample)


def test_decode_different_shapes_raise_one_table_everywhere_and_a_retry_works() -> None:
    results = values(run_ranks(different_shapes, 2))
    assert results[0] == results[1]
    name, text, same = results[0]
    assert name == "RankDisagreement"
    assert "rank 0: shape [1, 4, 4, 5, 7]; rank 1: shape [1, 4, 5, 5, 7]" in text
    assert same


def different_options(rank: int, size: int) -> tuple[str, str]:
    vae = make_vae("2.1")
    parallelize_decode(vae, mode="temporal" if rank else "spatial", deadline=DEADLINE)
    return decode_and_time(vae, make_latent(2))[:2]


def test_decode_different_options_raise_one_table_everywhere() -> None:
    results = values(run_ranks(different_options, 2))
    assert results[0] == results[1]
    assert results[0][0] == "RankDisagreement"
    assert "rank 0: mode spatial; rank 1: mode temporal" in results[0][1]


def one_rank_stays_away(rank: int, size: int) -> tuple[str, str, float]:
    vae = make_vae("2.1")
    parallelize_decode(vae, mode="temporal", deadline=2.0, raise_failures=True)
    if rank == 1:
        return "", "", 0.0  # the process stays until rank 0 has its answer too
    return decode_and_time(vae, make_latent(2))


def test_decode_rank_that_never_calls_it_is_named_within_the_deadline() -> None:
    name, text, seconds = values(run_ranks(one_rank_stays_away, 2))[0]
    assert name == "RankAbsent"
    assert text.startswith("rank 1 did not call decode within 2 s.")
    assert seconds < DEADLINE  # of the others: it did not wait for anything but its own


def plain_error_on_one_rank(rank: int, size: int) -> tuple[str, str]:
    vae = make_vae("2.1")
    parallelize_decode(vae, mode="auto", deadline=DEADLINE, raise_failures=True)
    if rank == 1:
        at_convolution(5, lambda: raise_(ValueError("injected")))
    return decode_and_time(vae, make_latent(5))[:2]


def test_auto_error_that_is_no_lack_of_memory_does_not_fall_back() -> None:
    for name, text in values(run_ranks(plain_error_on_one_rank, 2)):
        assert name == "RanksFailed"
        assert "rank 1: failed: ValueError: injected" in text


def interrupted_beside_unequal(rank: int, size: int, latents: int) -> tuple[str, str]:
    """Rank 0 finds its frames unequal; rank 1 is interrupted while it compares."""
    vae = make_vae("2.1")
    parallelize_decode(vae, mode="temporal", deadline=DEADLINE, raise_failures=True)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Framework, "compute", lambda *_: raise_(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                vae.decode(make_latent(latents))
            return "", ""
        spoil_convolutions(patch)
        return outcome_of(lambda: vae.decode(make_latent(latents)))[:2]


@pytest.mark.parametrize("latents", [2, 5], ids=["whole", "in a short call"])
def test_failure_beside_a_rank_that_is_not_equal_is_named(latents: int) -> None:
    name, text = values(run_ranks(interrupted_beside_unequal, 2, latents))[0]
    assert name == "RanksFailed"
    assert "failed on 1: rank 1: failed: KeyboardInterrupt." in text


def another_vae(rank: int, size: int, verb: str) -> tuple[str, str, float]:
    vae = make_vae("2.1")
    convolution = (vae.decoder if verb == "decode" else vae.encoder).conv_out
    if rank == 1:
        convolution.weight.data[0, 0, 0, 0, 0] += 1
    parallelize = parallelize_decode if verb == "decode" else parallelize_encode
    parallelize(vae, deadline=DEADLINE)
    given = make_latent(3) if verb == "decode" else torch.zeros(1, 3, 5, 16, 16)
    return outcome_of(lambda: getattr(vae, verb)(given))


@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_ranks_with_different_weights_stop_before_anything_runs(verb: str) -> None:
    results = values(run_ranks(another_vae, 2, verb))
    assert {name for name, _, _ in results} == {"RankDisagreement"}
    assert all("rank 0: weights " in text and "; rank 1: weights " in text for _, text, _ in results)


def sharded_vae(rank: int, size: int) -> tuple[bool, list[str]]:
    vae, latent = make_vae("2.1"), make_latent(3)
    expected = vae.decode(latent).sample
    fully_shard(vae.decoder)
    handle = parallelize_decode(vae, deadline=DEADLINE, raise_failures=True)
    return torch.equal(vae.decode(latent).sample, expected), list(handle._reasons)


def test_weights_that_ranks_have_shares_of_are_the_framework_s_to_gather() -> None:
    results = values(run_ranks(sharded_vae, 2))
    assert [same for same, _ in results] == [True, True]
    assert all(reason.startswith("weights of the VAE are of torch.distributed.tensor") for _, (reason,) in results)


def mode_on_one_rank(rank: int, size: int) -> tuple[bool, torch.dtype, list[str]]:
    vae, latent = make_vae("2.1"), make_latent(3)
    handle = parallelize_decode(vae, deadline=DEADLINE, uint8=True)
    began = time.monotonic()
    with FlopCounterMode(display=False) if rank == 0 else contextlib.nullcontext():
        frames = vae.decode(latent).sample
    return time.monotonic() - began < DEADLINE, frames.dtype, list(handle._reasons)


def test_mode_on_one_rank_leaves_the_call_to_the_framework_on_all() -> None:
    for in_time, dtype, reasons in values(run_ranks(mode_on_one_rank, 2)):
        assert in_time
        assert dtype == torch.uint8
        assert reasons == ["a _FlopCounterMode is on, which would not see how the decode is computed"]


def written_weights(rank: int, size: int) -> tuple[str, str, float]:
    """The addresses stay, and the first call has compared what was there."""
    vae = make_vae("2.1")
    parallelize_decode(vae, deadline=DEADLINE)
    vae.decode(make_latent(3))
    vae.load_state_dict(make_vae("2.1", seed=rank).state_dict())
    return outcome_of(lambda: vae.decode(make_latent(3)))


def test_weights_that_one_rank_has_loaded_between_two_calls_are_seen() -> None:
    results = values(run_ranks(written_weights, 2))
    assert {name for name, _, _ in results} == {"RankDisagreement"}
    assert all("rank 0: weights " in text and "; rank 1: weights " in text for _, text, _ in results)


def copied_vae(rank: int, size: int) -> tuple[bool, bool, list[str]]:
    """A copy of a shared VAE decodes by itself; and what both handles leave."""
    vae, latent = make_vae("2.1"), make_latent(5)
    expected = vae.decode(latent).sample
    decoding, encoding = parallelize_decode(vae, deadline=DEADLINE), parallelize_encode(vae, deadline=DEADLINE)
    vae.decode(latent)
    file = io.BytesIO()
    torch.save(vae, file)
    twin = copy.deepcopy(vae)
    alone = rank == 0 or torch.equal(twin.decode(latent).sample, expected)  # a shared one would wait for rank 0
    shared = torch.equal(vae.decode(latent).sample, expected)
    encoding.remove()
    decoding.remove()
    return alone, shared, [name for name in vars(vae) if name.startswith(("__", "_wanshim")) or name == "decode"]


@pytest.mark.slow
def test_copies_of_a_shared_vae_are_plain() -> None:
    assert values(run_ranks(copied_vae, 2)) == [(True, True, [])] * 2


Found = tuple[list[bool], list[str]]


def left_to_the_framework(vae: Any, latent: torch.Tensor, expected: torch.Tensor, handle: Any) -> Found:
    """Of two calls: whether the frames were the framework's, and the reasons."""
    equal = [torch.equal(vae.decode(latent).sample, expected) for _ in range(2)]
    return equal, list(handle._reasons)


def kernels_do_not_compile(rank: int, size: int) -> tuple[Found, int]:
    """Triton is there on both ranks, as on a GPU, and rank 1 has no C compiler."""
    vae, latent = make_vae("2.1"), make_latent(5)
    expected, asked = vae.decode(latent).sample, []
    handle = parallelize_decode(vae, deadline=DEADLINE)

    def prepare(*_: Any) -> bool:
        asked.append(1)
        if rank == 1:
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "available", lambda like: True)
        patch.setattr(handle.parallel.operators.checks, "prepare", prepare)
        return left_to_the_framework(vae, latent, expected, handle), len(asked)


@pytest.mark.slow
def test_rank_whose_kernels_do_not_compile_says_so_and_all_ranks_have_the_frameworks_frames() -> None:
    for (equal, reasons), asked in values(run_ranks(kernels_do_not_compile, 2)):
        assert equal == [True, True]
        assert reasons == [
            "decode on 2 ranks failed on 1: rank 1: failed: RuntimeError: Failed to find C compiler. "
            "Please specify via CC environment variable."
        ]
        assert asked == 1  # the second call does not try again


def error_within_the_attempt(rank: int, size: int) -> Found:
    vae, latent = make_vae("2.1"), make_latent(5)
    expected = vae.decode(latent).sample
    handle = parallelize_decode(vae, deadline=DEADLINE)
    if rank == 1:
        at_convolution(5, lambda: raise_(ValueError("PassManager::run failed\nmore")))
    return left_to_the_framework(vae, latent, expected, handle)


def test_error_on_one_rank_within_the_attempt_leaves_the_frames_to_the_framework_on_all() -> None:
    for equal, reasons in values(run_ranks(error_within_the_attempt, 2)):
        assert equal == [True, True]
        assert len(reasons) == 1
        assert "rank 1: failed: ValueError: PassManager::run failed" in reasons[0]
        assert "more" not in reasons[0]


def frames_to_a_callback(rank: int, size: int) -> tuple[str, str, list[int]]:
    """Rank 0 gets the frames, and its callback fails."""
    vae = make_vae("2.1")
    seen: list[int] = []

    def on_chunk(frames: torch.Tensor, start: int) -> None:
        seen.append(start)
        raise OSError("the disk is full")

    parallelize_decode(vae, mode="temporal", deadline=DEADLINE, output=0, on_chunk=on_chunk)
    return (*outcome_of(lambda: vae.decode(make_latent(5)))[:2], seen)


@pytest.mark.slow
def test_frames_that_a_callback_has_are_not_sent_to_it_again() -> None:
    name, text, seen = values(run_ranks(frames_to_a_callback, 2))[0]
    assert name == "RanksFailed"
    assert "OSError: the disk is full" in text
    assert seen == [0]
