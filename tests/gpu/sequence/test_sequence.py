"""The same promises over NCCL as over gloo; and the host waits for nothing in a step."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import wanshim
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.cases import EXACT, quick
from tests.distributed.sequence.faults import DEADLINE, SECONDS, break_block, outcome_of, raise_
from tests.distributed.sequence.tiny import Case, farthest
from wanshim.core.shared.digest import digest_weights

SIZES = [pytest.param(size, marks=pytest.mark.gpu(size), id=f"{size} GPUs") for size in (2, 4)]
CASE = Case(checkpointing="saved", device="cuda")
pytestmark = pytest.mark.timeout(400)


def exact(rank: int, size: int) -> dict[Case, float]:
    groups = {n: dist.new_group(list(range(n))) for n in range(2, size + 1)}
    done = {}
    for case in [replace(case, device="cuda") for case in quick() if case.ranks <= size]:
        if rank < case.ranks:
            expected, model = case.step(case.model()), case.model()
            handle = wanshim.shard_sequence(model, groups[case.ranks], deadline=60)
            done[case] = farthest(case.step(model), expected)
            handle.remove()
    return done


@pytest.mark.parametrize("size", SIZES)
def test_sharded_step_over_nccl_is_the_unsharded_one(size: int) -> None:
    for done in values(run_ranks(exact, size, seconds=240, backend="nccl")):
        for case, distance in done.items():
            assert distance <= EXACT, case


def without_waits(rank: int, size: int) -> float:
    """A step in which torch raises on every wait of the host for the device."""
    expected, model = CASE.step(CASE.model()), CASE.model()
    handle = wanshim.shard_sequence(model, deadline=60)
    sample = CASE.sample(1)
    target = sample.pop("target")
    for _ in range(2):  # the first one connects and compiles
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if _ else "default")
        loss = torch.nn.functional.mse_loss(model(**sample, checkpointing="saved"), target)
        handle.compare_loss(loss)
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")
    found = [loss.item()], {name: p.grad for name, p in model.named_parameters()}
    handle.remove()
    return farthest(found, expected)


@pytest.mark.gpu(2)
def test_host_waits_for_nothing_in_a_step() -> None:
    assert max(values(run_ranks(without_waits, 2, backend="nccl"))) <= EXACT


def faulty(rank: int, size: int, kind: str) -> tuple[str, str, float]:
    """The host runs ahead of the device: what stops a step is raised by the next one, or by `check()` before a save."""
    model = CASE.model()
    handle = wanshim.shard_sequence(model, deadline=DEADLINE)
    CASE.step(model)
    if rank == 1 and kind == "killed":
        break_block(model, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if rank == 1 and kind == "oom":
        break_block(model, 2, lambda: raise_(torch.OutOfMemoryError("CUDA out of memory. Tried 20 GiB")))
    case = replace(CASE, tokens=31) if rank == 1 and kind == "shapes" else CASE
    seed = 2 if rank == 1 and kind == "values" else 1
    return outcome_of(lambda: (case.step(model, first_seed=seed), handle.check()))


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("kind", "error", "cause"),
    [
        ("killed", "RanksFailed", "rank 1: gone"),
        ("oom", "RanksFailed", "rank 1: OutOfMemoryError: CUDA out of memory"),
        ("values", "RankDisagreement", "different x and context and t_mod in call 2"),
        ("shapes", "RankDisagreement", "rank 1: x float32 [1, 31, 20]"),
    ],
)
def test_fault_of_one_rank_over_nccl_ends_the_other_in_time(kind: str, error: str, cause: str) -> None:
    outcome = run_ranks(faulty, 2, kind, backend="nccl")[0]
    found, message, seconds = values([outcome])[0]
    assert found == error
    assert cause in message
    assert seconds < SECONDS


def other_weights(rank: int, size: int) -> float:
    """Trained weights that differ travel over NCCL, before the model is called."""
    model = CASE.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    handle = wanshim.shard_sequence(model, deadline=60)
    found = CASE.step(model)
    handle.remove()
    return farthest(found, CASE.step(CASE.model()))


@pytest.mark.gpu(2)
def test_trained_weights_come_from_the_first_rank_over_nccl() -> None:
    assert max(values(run_ranks(other_weights, 2, backend="nccl"))) <= EXACT


def dropping(rank: int, size: int) -> str:
    model = CASE.model()
    handle = wanshim.shard_sequence(model, deadline=60)
    CASE.step(model)
    model.blocks[1].register_forward_hook(lambda block, args, output: torch.nn.functional.dropout(output, 0.1))
    handle.remove()
    wanshim.shard_sequence(model, deadline=60)
    return outcome_of(lambda: CASE.step(model))[1]


@pytest.mark.gpu(2)
def test_numbers_that_a_block_draws_on_the_device_are_refused() -> None:
    for text in values(run_ranks(dropping, 2, backend="nccl")):
        assert text.startswith("Block 1 draws random numbers. Expected blocks without dropout")


@pytest.mark.gpu(1)
def test_digest_of_a_weight_on_the_device_reads_every_element() -> None:
    weight = torch.zeros(2**22, dtype=torch.bfloat16, device="cuda")
    before = digest_weights([weight])
    for place in (0, 9000, 2**21 + 1, 2**22 - 1):
        changed = weight.clone()
        changed[place] = 1
        assert digest_weights([changed]) != before
