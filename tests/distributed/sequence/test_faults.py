"""Whatever befalls one rank, every rank ends within the deadline with that rank's error, and nobody steps on it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wanshim
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.sequence.faults import DEADLINE, SECONDS, break_block, outcome_of, raise_
from wanshim.errors import ModelInvalid, RanksFailed, WanshimError

from .tiny import Case, Transformer, farthest

CASE = Case(ranks=3, checkpointing="saved")


def sharded(case: Case = CASE, **options: Any) -> tuple[Transformer, Any]:
    model = case.model()
    return model, wanshim.shard_sequence(model, deadline=options.pop("deadline", DEADLINE), **options)


def error_in_a_block(rank: int, size: int, when: int, kind: str) -> tuple[str, str, float]:
    model, _ = sharded()
    error = ValueError("injected") if kind == "error" else torch.OutOfMemoryError("CUDA out of memory. Tried 20 GiB")
    if rank == 1:
        break_block(model, when, lambda: raise_(error))
    return outcome_of(lambda: CASE.step(model))


@pytest.mark.parametrize(
    ("when", "kind"), [pytest.param(1, "error", marks=pytest.mark.slow), (2, "oom")], ids=["forward", "recomputation"]
)
def test_error_in_a_block_of_one_rank_ends_all_ranks_with_its_name(when: int, kind: str) -> None:
    results = values(run_ranks(error_in_a_block, 3, when, kind))
    name, text = ("ValueError", "injected") if kind == "error" else ("OutOfMemoryError", "CUDA out of memory")
    assert results[1][0] == name
    for found, message, seconds in (results[0], results[2]):
        assert found == "RanksFailed"
        assert f"rank 1: {name}: {text}" in message
        assert seconds < SECONDS


def uncaught_error(rank: int, size: int) -> tuple[str, str, float]:
    model, _ = sharded()
    if rank == 0:  # between two steps, in code that is not ours; rank 0 hosts the store
        CASE.step(model)
        try:
            raise KeyError("a sample is missing")
        except KeyError:
            sys.excepthook(*sys.exc_info())  # what Python does with an error that nobody catches
            os._exit(1)
    return outcome_of(lambda: [CASE.step(model) for _ in range(2)])


def test_uncaught_error_of_one_rank_ends_the_others_with_its_name() -> None:
    outcomes = run_ranks(uncaught_error, 3)
    assert outcomes[0].error == "Died"
    for found, message, seconds in values(outcomes[1:]):
        assert found == "RanksFailed"
        assert "rank 0: KeyError: 'a sample is missing'" in message
        assert seconds < SECONDS


def error_that_the_caller_reports(rank: int, size: int) -> tuple[str, str, float]:
    model, handle = sharded()
    if rank == 1:
        handle.fail(RuntimeError("the video cannot be read"))
        return "", "", 0.0
    return outcome_of(lambda: CASE.step(model))


def test_reported_error_ends_the_others_with_its_name() -> None:
    found, message, seconds = values(run_ranks(error_that_the_caller_reports, 2))[0]
    assert (found, seconds < SECONDS) == ("RanksFailed", True)
    assert "rank 1: RuntimeError: the video cannot be read" in message


def early_stop(rank: int, size: int) -> tuple[object, float]:
    """Rank 0, which hosts the store, stops early and is gone at once."""
    model, handle = sharded()
    CASE.step(model)
    if rank == 0:
        handle.fail(SystemExit(0))
        os._exit(0)
    start = time.monotonic()
    try:
        CASE.step(model)
    except SystemExit as exit:
        return exit.code, time.monotonic() - start
    return "went on", 0.0


def test_normal_exit_of_one_rank_ends_the_others_with_its_status() -> None:
    for code, seconds in values(run_ranks(early_stop, 3)[1:]):
        assert code == 0
        assert seconds < SECONDS


def killed_in_the_middle(rank: int, size: int, victim: int) -> tuple[str, str, float]:
    model, _ = sharded()
    if rank == victim:
        break_block(model, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return outcome_of(lambda: CASE.step(model))


@pytest.mark.parametrize("victim", [1, 0], ids=["a rank", "the rank that hosts the store"])
def test_killed_rank_ends_the_others_in_time(victim: int) -> None:
    outcomes = run_ranks(killed_in_the_middle, 3, victim)
    assert outcomes[victim].error == "Died"
    for found, message, seconds in values([o for r, o in enumerate(outcomes) if r != victim]):
        assert found == "RanksFailed"
        assert ("rank 1: gone" if victim else "which rank 0 of the job hosts, is gone") in message
        assert seconds < SECONDS


def held_interpreter(rank: int, size: int) -> float:
    """Rank 0 writes for longer than a rank may be silent, in a call that does not let go of the interpreter."""
    import ctypes

    expected = CASE.step(CASE.model())
    model, handle = sharded(deadline=6.0)
    if rank == 0:
        ctypes.PyDLL(None).sleep(4)
    handle.attendance.meet(60.0)
    distance = farthest(CASE.step(model), expected)
    handle.remove()
    return distance


@pytest.mark.slow
def test_rank_whose_interpreter_is_held_is_not_gone() -> None:
    assert max(values(run_ranks(held_interpreter, 2))) <= 1e-5


def late_rank(rank: int, size: int) -> tuple[str, str, float]:
    model, _ = sharded(deadline=3.0)
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    while rank == 1 and not store.check(["rank 0 has given up"]):
        time.sleep(0.05)  # `wait` would keep the store from the handle's own thread
    found = outcome_of(lambda: CASE.step(model))
    if rank == 0:
        store.set("rank 0 has given up", "")
    return found


@pytest.mark.slow
def test_rank_that_stays_away_is_named_within_the_deadline() -> None:
    (_, waiting, _), late = values(run_ranks(late_rank, 2))
    for message in (waiting, late[1]):
        assert "rank 0: nothing within 3 s" in message
    assert "rank 1 is in call 0" in waiting  # the late one says where it is by then
    assert late[0] == "RanksFailed"


def different_inputs(rank: int, size: int, kind: str) -> tuple[str, str, float, bool]:
    case = CASE if kind == "values" or rank == 0 else Case(ranks=3, checkpointing="saved", tokens=31)
    model, _ = sharded()
    stepped = []

    def step() -> None:
        case.loss(model, 1 if kind == "shapes" or rank == 0 else 2).backward()
        stepped.append(True)

    return (*outcome_of(step), bool(stepped))


@pytest.mark.parametrize("kind", ["values", "shapes"])
def test_different_inputs_raise_one_table_before_the_optimizer_can_step(kind: str) -> None:
    results = values(run_ranks(different_inputs, 2, kind))
    for found, message, seconds, stepped in results:
        assert found == "RankDisagreement"
        assert not stepped
        assert seconds < SECONDS
        assert message == results[0][1]
    expected = (
        "different x and context and t_mod" if kind == "values" else "rank 1: x float32 [1, 31, 20] with a gradient"
    )
    assert expected in results[0][1]


def moved_tokens(rank: int, size: int) -> tuple[str, str, float]:
    """The same numbers in another order: a sum or a maximum would not see it."""
    model, _ = sharded()
    model.patch.register_forward_hook(lambda *a: a[-1].flip(1) if rank else None)
    return outcome_of(lambda: CASE.step(model))


def test_inputs_in_another_order_are_found() -> None:
    for found, message, _ in values(run_ranks(moved_tokens, 2)):
        assert found == "RankDisagreement"
        assert "different x in call 1" in message


def different_losses(rank: int, size: int, kind: str) -> tuple[str, str, float, bool]:
    """The second step's loss has a term on what a block computes inside, a weight of each rank, or rounding alone."""
    model, handle = sharded()
    inside = list[torch.Tensor]()
    model.blocks[1].register_forward_hook(lambda *given: inside.append(given[-1]))
    weights = {"weight": 1 + 0.01 * rank, "rounding": 1 + 1e-6 * rank}
    stepped = []

    def step() -> None:
        for number in range(2):
            loss = CASE.loss(model, 1)
            if number and kind == "inside":
                loss = loss + inside[-1].square().mean()
            elif number:
                loss = loss * weights[kind]
            handle.compare_loss(loss)
            loss.backward()
            stepped.append(number)

    return (*outcome_of(step), stepped == [0, 1])


@pytest.mark.parametrize("kind", ["inside", "weight"])
def test_different_losses_raise_one_table_before_the_optimizer_can_step(kind: str) -> None:
    results = values(run_ranks(different_losses, 2, kind))
    assert results[0][1] == results[1][1]
    for found, message, seconds, stepped in results:
        assert (found, stepped) == ("RankDisagreement", False)
        assert message.startswith("The ranks computed different losses:\n  rank 0: ")
        assert "Expected the same loss on every rank of the group. Compute it from the model's output" in message
        assert seconds < SECONDS


def test_losses_that_differ_by_rounding_are_the_same() -> None:
    assert [found for found, _, _, stepped in values(run_ranks(different_losses, 2, "rounding")) if stepped] == ["", ""]


def nan(rank: int, size: int, where: str) -> tuple[str, str, float]:
    model, _ = sharded()

    def step() -> None:
        loss = CASE.loss(model, 1)
        (loss * float("nan") if where == "loss" else loss).backward()

    if where == "one rank" and rank == 1:
        model.blocks[2].ffn.register_forward_hook(lambda *a: a[-1] / 0)
    return outcome_of(step)


@pytest.mark.parametrize("where", ["loss", "one rank"])
def test_nan_ends_all_ranks_with_the_cause(where: str) -> None:
    for found, message, seconds in values(run_ranks(nan, 2, where)):
        assert found == "RanksFailed"
        assert "the loss has a gradient that is NaN or infinite" in message
        assert seconds < SECONDS


def failed_then_again(rank: int, size: int) -> tuple[str, str, float]:
    """After a failure the handle stays closed; a new one works."""
    expected = CASE.step(CASE.model())
    model, handle = sharded()
    if rank == 1:
        break_block(model, 1, lambda: raise_(ValueError("injected")))
    first = outcome_of(lambda: CASE.step(model))[0]
    second = outcome_of(lambda: CASE.step(model))[0]
    handle.remove()
    gc.collect()  # an error in a checkpointed block leaves its hooks on saved tensors until then (torch 2.9)
    handle = wanshim.shard_sequence(model, deadline=DEADLINE)
    distance = farthest(CASE.step(model), expected)
    handle.remove()
    return first, second, distance


def test_after_a_failure_a_new_handle_works_and_the_old_one_does_not() -> None:
    results = values(run_ranks(failed_then_again, 2))
    assert [r[0] for r in results] == ["RanksFailed", "ValueError"]
    assert {r[1] for r in results} == {"RanksFailed"}
    assert max(r[2] for r in results) <= 1e-5


def backward_that_fails(rank: int, size: int) -> tuple[str, str, float]:
    """An error in a backward pass leaves gradients of one rank alone: what follows must not use them."""
    model, _ = sharded()
    if rank == 1:
        model.patch.weight.register_hook(lambda _: raise_(ValueError("injected")))

    def step() -> None:
        if rank == 1:
            outcome_of(lambda: CASE.loss(model, 1).backward())
        else:
            CASE.loss(model, 1).backward()
        CASE.loss(model, 2)

    return outcome_of(step)


def test_forward_after_a_failed_backward_ends_all_ranks() -> None:
    for found, message, _ in values(run_ranks(backward_that_fails, 2)):
        assert found == "RanksFailed"
        assert "rank 1: a backward pass ended with an error" in message


def different_models(rank: int, size: int) -> tuple[str, str, float]:
    return outcome_of(lambda: sharded(Case(trained="blocks" if rank else "all")))


def test_different_models_raise_one_table() -> None:
    results = values(run_ranks(different_models, 2))
    assert {found for found, _, _ in results} == {"RankDisagreement"}
    assert results[0][1] == results[1][1]


def bad_calls(rank: int, size: int) -> dict[str, str]:
    """What is said about each; every model is untouched afterwards."""

    def said(call: Callable[[], Any]) -> str:
        try:
            call()
        except ModelInvalid as error:
            return str(error)
        return "nothing"

    model, handle = sharded()
    twice = said(lambda: wanshim.shard_sequence(model))
    replaced = model.blocks[1].self_attn.v
    model.blocks[1].self_attn.v = torch.nn.Sequential(replaced)
    with pytest.raises((ModelInvalid, RanksFailed)) as caught:  # whichever rank comes first stops the other
        CASE.loss(model, 1)
    model.blocks[1].self_attn.v = replaced
    handle.remove()
    return {
        "twice": twice,
        "replaced": str(caught.value),
        "heads": said(lambda: wanshim.shard_sequence(Transformer(1))),
        "blocks": said(lambda: wanshim.shard_sequence(torch.nn.Linear(2, 2))),
    }


def test_bad_calls_get_one_clear_error_each() -> None:
    said = values(run_ranks(bad_calls, 2))
    replaced = [one.pop("replaced") for one in said]
    assert said[0] == said[1]
    assert said[0]["twice"] == "Transformer is sharded already. Call remove() on its handle first."
    for text in replaced:
        assert "self_attn.v of block 1 is another module than when the model was sharded." in text
        assert "inject adapters such as LoRA" in text
    assert said[0]["heads"].startswith("2 ranks for 1 attention head. Expected at most as many ranks as heads")
    assert said[0]["blocks"].startswith("Linear has no ModuleList named blocks.")


def too_few_tokens(rank: int, size: int) -> str:
    model, _ = sharded(Case(heads=4))
    return outcome_of(lambda: Case(heads=4, tokens=2).loss(model, 1))[1]


def test_fewer_tokens_than_ranks_is_one_clear_error() -> None:
    for message in values(run_ranks(too_few_tokens, 3)):
        assert message.startswith("2 tokens for 3 ranks. Expected at least one token a rank.")


def test_one_process_alone_is_one_clear_error() -> None:
    with pytest.raises(WanshimError, match="a process without a process group") as caught:
        wanshim.shard_sequence(Transformer(4))
    assert "Start one process for each GPU" in str(caught.value)


def one_rank(rank: int, size: int) -> str:
    return outcome_of(lambda: wanshim.shard_sequence(Transformer(4)))[1]


def test_group_of_one_is_one_clear_error() -> None:
    assert values(run_ranks(one_rank, 1))[0].startswith("a sequence group of rank 0. Expected two or more")
