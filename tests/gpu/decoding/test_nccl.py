"""Decode and encode over NCCL: the same promises as over gloo, and an end for every rank when one of them fails."""

from __future__ import annotations

import pytest

from tests.distributed.decoding.ranks import Outcome, run_ranks, values

from .everything import DEADLINE, Case, Failed, Told, calls, failures, killed, short_call_out_of_memory

SIZES = [pytest.param(size, marks=pytest.mark.gpu(size), id=f"{size} GPUs") for size in (2, 4)]
pytestmark = pytest.mark.timeout(560)


@pytest.fixture(scope="module", params=SIZES)
def told(request: pytest.FixtureRequest) -> list[dict[Case, Told]]:
    """What every rank told of its calls, from one set of processes per number of GPUs."""
    return values(run_ranks(calls, request.param, seconds=480, backend="nccl"))


@pytest.fixture(scope="module", params=SIZES)
def failed(request: pytest.FixtureRequest) -> list[dict[str, Failed]]:
    """How the calls ended that were made to fail."""
    return values(run_ranks(failures, request.param, seconds=240, backend="nccl"))


@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_call_over_nccl_keeps_its_promises(told: list[dict[Case, Told]], verb: str) -> None:
    for rank, called in enumerate(told):
        for case, found in called.items():
            if case.verb != verb:
                continue
            where = f"rank {rank}, {case}: {found}"
            assert (found.count > 0) == (case.output == "all" or rank == case.output), where
            assert found.mode == case.mode, where
            if case.strict and case.mode == "temporal":
                assert found.equal, where
            elif case.dtype == "float32" and case.mode != "tile":
                assert found.difference <= 1e-5, where
            elif case.mode == "tile":  # diffusers blends in the dtype, element by element; one unit at most
                assert found.difference <= (1e-5 if case.dtype == "float32" else 0.016), where


@pytest.mark.parametrize("mode", ["temporal", "spatial"])
@pytest.mark.parametrize(
    ("what", "culprit"),
    [
        ("out of memory, {}, strict", 1),
        ("out of memory in the first call, {}", 0),
        ("encode out of memory, {}", 1),
    ],
)
def test_call_over_nccl_out_of_memory_on_one_rank_fails_on_all_and_a_retry_works(
    failed: list[dict[str, Failed]], what: str, culprit: int, mode: str
) -> None:
    for ends in failed:
        end = ends[what.format(mode)]
        assert end.name == "RanksFailed", end
        assert f"rank {culprit}: out of memory" in end.text, end
        assert end.seconds < DEADLINE, end
        assert end.again, end


@pytest.mark.parametrize("size", SIZES)
def test_short_call_over_nccl_out_of_memory_on_one_rank_fails_no_call_and_the_next_is_compared(size: int) -> None:
    for found in values(run_ranks(short_call_out_of_memory, size, seconds=120, backend="nccl")):
        assert found.equal == [True, True], found
        assert found.claims == ["strict, not compared", "strict, compared"], found
        assert len(found.said) == 1, found
        assert "rank 0: out of memory" in found.said[0], found
        assert found.seconds < DEADLINE, found


def test_decode_over_nccl_out_of_memory_on_one_rank_takes_all_to_smaller_chunks(
    failed: list[dict[str, Failed]],
) -> None:
    for ends in failed:
        end = ends["out of memory, spatial, fast"]
        assert end.name == "", end
        assert end.seconds < DEADLINE, end
        assert end.again, end


def test_decode_over_nccl_different_shapes_raise_one_table_everywhere_and_a_retry_works(
    failed: list[dict[str, Failed]],
) -> None:
    ends = [of["different shapes"] for of in failed]
    assert len({end.text for end in ends}) == 1
    for end in ends:
        assert end.name == "RankDisagreement"
        assert "rank 0: shape [1, 4, 4, 9, 14]" in end.text
        assert end.seconds < DEADLINE
        assert end.again


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", ["temporal", "spatial"])
def test_decode_over_nccl_rank_killed_in_the_middle_fails_on_the_others_in_time(mode: str) -> None:
    outcomes = run_ranks(killed, 2, mode, seconds=150, backend="nccl")
    assert outcomes[1] == Outcome(error="Died", text=outcomes[1].text, exitcode=-9)
    survivor = values(outcomes[:1])[0]
    assert survivor.name == "RanksFailed"
    assert "rank 1: gone" in survivor.text
    assert survivor.seconds < DEADLINE + 2
