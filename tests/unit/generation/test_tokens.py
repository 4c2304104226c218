"""The tokens of a forward over processes: frames within rounding for every way, and what ends a worker names it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import wanshim
from tests.unit.generation import toy
from tests.unit.workers.forked import forked_in_module  # noqa: F401, a fixture
from wanshim.core.generation import Request, SharedPipeline
from wanshim.errors import ModelInvalid, WorkersFailed

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_in_module")]
WAYS = [(2, 2), (1, 4), (1, 3), (1, 2)]
EARLY = ["k", "q normed", "k normed"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPipeline]:
    """Three workers, for every way that needs so many or fewer."""
    made = SharedPipeline(Request(gpus=4), deadline=60)
    yield made
    made.close()


@pytest.fixture(scope="module")
def kept() -> list[toy.Model]:
    """Models whose copies the workers keep: those that hold nothing may end where a plan needs fewer."""
    return []


@pytest.fixture
def model(kept: list[toy.Model]) -> toy.Model:
    torch.manual_seed(0)
    kept.append(toy.Model())
    return kept[-1]


def run(
    shared: SharedPipeline, model: toy.Model | toy.JointModel, way: tuple[int, int] = (2, 2), **given: Any
) -> torch.Tensor:
    shared.request = Request(gpus=4, at_most=way)
    given = {"tokens": 11, "guided": way[0] == 2, **given}
    found = shared.run(partial(toy.bind, model, given["guided"]), partial(toy.generate, model, **given))
    assert shared.plan is not None
    assert (shared.plan.guidance, shared.plan.sequence) == way
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_frames_are_those_of_one_process_within_rounding(
    shared: SharedPipeline, model: toy.Model, way: tuple[int, int]
) -> None:
    """Five heads over two, three and four processes; tokens that do not divide; batches; another size each call."""
    pids = shared.pids
    for tokens, batch, guided in ((11, 1, True), (4, 2, True), (29, 1, False)):
        guided = guided and way[0] == 2
        given = {"tokens": tokens, "batch": batch, "guided": guided}
        expected = toy.generate(model, **given)
        before = shared.shared_forwards
        found = run(shared, model, way if guided or way[0] == 1 else (1, way[1]), **given)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert shared.shared_forwards - before == 3
    assert not pids or shared.pids == pids
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert {block.attention.heads for block in model.blocks} == {toy.HEADS}


def test_only_workers_of_the_plan_are_sent_copies(model: toy.Model) -> None:
    """Those that began before there was a plan may be more: theirs may be the devices that have no memory for it."""
    shared = SharedPipeline(Request(gpus=4), deadline=61)  # whose workers no other test's pipeline shares
    shared.begin(toy.bind(model))
    began = shared.pids
    assert len(began) == 3
    for _ in range(2):
        run(shared, model, (2, 1))
        assert shared.pids == began[:1]
    shared.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_text_beside_the_tokens_is_whole_on_each_process(shared: SharedPipeline, way: tuple[int, int]) -> None:
    """Three tokens of text, one of them masked; the tokens and five heads do not divide."""
    torch.manual_seed(0)
    model = toy.JointModel()
    for tokens, batch in ((11, 1), (4, 2)):
        given = {"tokens": tokens, "batch": batch, "guided": way[0] == 2}
        expected = toy.generate(model, **given)
        found = run(shared, model, way, **given)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert {block.attention.width for block in model.blocks} == {toy.HEADS * toy.DIM}


def test_training_over_ranks_refuses_text_beside_the_tokens() -> None:
    model = toy.JointModel()
    with pytest.raises(ModelInvalid, match=r"JointModel has blocks of two streams\. Expected blocks of one"):
        wanshim.shard_sequence(model, blocks=toy.blocks_of(model))


def test_a_change_of_a_weight_reaches_every_copy(shared: SharedPipeline, model: toy.Model) -> None:
    run(shared, model)
    before = toy.generate(model, 11)
    model.blocks[1].attention.v.weight.data *= 3
    expected = toy.generate(model, 11)
    assert not torch.allclose(before, expected, rtol=1e-3)
    assert torch.allclose(run(shared, model), expected, rtol=1e-5, atol=1e-5)


def test_a_worker_of_the_other_half_that_is_killed_is_named(shared: SharedPipeline, model: toy.Model) -> None:
    run(shared, model)
    pids = shared.pids
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(WorkersFailed, match=f"process {pids[2]}"):
        run(shared, model)
    assert shared.pids == ()


def compared(shared: SharedPipeline, model: toy.Model, way: tuple[int, int]) -> torch.Tensor:
    shared.request = Request(gpus=4, at_most=way)
    bind = partial(toy.bind, model, way[0] == 2, compares=True)
    return shared.run(bind, partial(toy.generate, model, 11, guided=way[0] == 2))


@pytest.mark.parametrize(("way", "early"), [*zip(WAYS, ["q"] * 4, strict=True), *(((1, 2), e) for e in EARLY)], ids=str)
def test_block_that_reads_tokens_before_they_have_arrived_stays_in_one_process(
    shared: SharedPipeline, model: toy.Model, way: tuple[int, int], early: str
) -> None:
    expected = toy.generate(model, 11, guided=way[0] == 2)
    assert torch.allclose(compared(shared, model, way), expected, rtol=1e-5, atol=1e-5)
    assert shared.plan is not None
    assert (shared.plan.guidance, shared.plan.sequence) == way
    model.blocks[1].attention.early = early
    expected = toy.generate(model, 11, guided=way[0] == 2)
    assert torch.equal(compared(shared, model, way), expected)
    assert shared.plan.gpus == 1
    assert any("before they have arrived" in reason for reason in shared.plan.rejected.values())


def test_a_worker_of_the_other_half_that_fails_in_the_comparison_is_named(
    shared: SharedPipeline, model: toy.Model
) -> None:
    run(shared, model)
    begun, pid = time.monotonic(), shared.pids[2]
    model.blocks[1].raises_together_in = pid
    with pytest.raises(WorkersFailed, match=rf"process {pid}\) failed: OutOfMemoryError"):
        compared(shared, model, (2, 2))
    assert time.monotonic() - begun < 30
    model.blocks[1].raises_together_in = 0
    expected = toy.generate(model, 11)
    assert torch.allclose(compared(shared, model, (2, 2)), expected, rtol=1e-5, atol=1e-5)


def test_workers_that_compute_other_values_serve_the_next_call(shared: SharedPipeline, model: toy.Model) -> None:
    expected = toy.generate(model, 11, guided=False)
    run(shared, model, (1, 3))
    pids = shared.pids
    model.blocks[0].does = "differs"
    assert torch.equal(compared(shared, model, (1, 3)), expected)
    assert shared.plan is not None
    assert any("computes other values" in reason for reason in shared.plan.rejected.values())
    model.blocks[0].does = ""
    assert torch.allclose(compared(shared, model, (1, 3)), expected, rtol=1e-5, atol=1e-5)
    assert shared.plan.sequence == 3
    assert shared.pids == pids


@pytest.mark.parametrize(
    ("does", "text"),
    [
        ("raises", r"process \d+\) failed: OutOfMemoryError: tried to allocate"),
        ("ends", r"process \d+\) was ended by SIGKILL"),
        pytest.param("stops", r"process \d+\) gave no sign of life for 5 s", marks=pytest.mark.slow),
        pytest.param("sleeps", r"process \d+\) did not reply within 4 s", marks=pytest.mark.slow),
    ],
)
def test_what_ends_a_worker_in_an_exchange_names_it_and_the_next_call_is_whole(
    shared: SharedPipeline, model: toy.Model, does: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in the exchange of the second block, and so does this process."""
    expected = run(shared, model, (1, 2))
    assert shared._workers is not None
    for worker in shared._workers._running.workers:
        worker.link.limit_silence(5.0)
    monkeypatch.setattr(shared._workers, "deadline", 4.0 if does == "sleeps" else 60.0)
    pids = shared.pids
    model.blocks[1].does = does
    begun = time.monotonic()
    with pytest.raises(WorkersFailed, match=text):
        run(shared, model, (1, 2))
    assert time.monotonic() - begun < 55
    assert shared.pids == ()
    assert not any(alive(pid) for pid in pids)
    model.blocks[1].does = ""
    monkeypatch.undo()
    assert torch.equal(run(shared, model, (1, 2)), expected)


def test_an_interrupt_of_the_program_and_its_own_error_end_the_workers(
    shared: SharedPipeline, model: toy.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(shared, model, (1, 2))
    with pytest.raises(ModelInvalid, match="1 token for 2 ranks"):
        run(shared, model, (1, 2), tokens=1)
    assert shared.pids == ()
    run(shared, model, (1, 2))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(toy.Block, "forward", lambda self, x, prompt: interrupted())
    with pytest.raises(KeyboardInterrupt):
        run(shared, model, (1, 2))
    assert shared.pids == ()
    assert {block.attention.heads for block in model.blocks} == {toy.HEADS}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
