"""The hazards of a pipeline, each on a small model of any kind."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from wanshim.core.model_split import split_model
from wanshim.core.offload import CheckpointOffload
from wanshim.core.offload.channel import IN_FLIGHT
from wanshim.core.pipeline import PendingLoss, Pipeline, refusal
from wanshim.errors import WanshimError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * shared) + self.linear(shared)


class Model(nn.Module):
    """An embedding, blocks that share an input, a head; random noise is drawn before the blocks."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape[0], 8).to(x.device)
        shared = torch.sigmoid(self.embed(x))
        x = self.embed(x) + noise
        for block in self.blocks:
            x = checkpoint(block, x, shared, use_reentrant=False, preserve_rng_state=False)
        return self.head(x).pow(2).mean()


@pytest.fixture(autouse=True)
def _no_lane_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while any(t.name.startswith("wanshim micro-batch") for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name.startswith("wanshim micro-batch")]


def data(number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def lanes_of(model: Model, stages: int = 2) -> Pipeline:
    return Pipeline(split_model(model, ["cpu"] * stages, blocks="blocks", exits=("head",)))


def run(
    pipeline: Pipeline, model: Model, count: int, between: Callable[[], object] = lambda: None
) -> list[PendingLoss]:
    losses = []
    for number in range(count):
        loss = pipeline.submit(partial(model, data(number)))
        pipeline.backward(loss, torch.Tensor.backward)
        between()
        losses.append(loss)
    pipeline.join()
    return losses


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_random_draws_of_lanes_and_caller_keep_their_serial_order(stages: int) -> None:
    def draws(work: Callable[[Callable[[], object]], list[float]]) -> tuple[list[float], list[float]]:
        torch.manual_seed(5)
        drawn: list[float] = []
        return work(lambda: drawn.append(torch.rand(()).item())), drawn

    def serial(between: Callable[[], object]) -> list[float]:
        losses = []
        for number in range(6):
            loss = plain(data(number))
            loss.backward()
            between()
            losses.append(loss.item())
        return losses

    plain, model = Model(), Model()
    pipeline = lanes_of(model, stages)
    expected = draws(serial)
    assert draws(lambda between: [loss.item() for loss in run(pipeline, model, 6, between)]) == expected
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, dict(plain.named_parameters())[name].grad), name


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stage_holds_the_activations_of_one_forward_one_backward(stages: int) -> None:
    """Memory in flight: counted at the first block of each stage, from its forward to its backward."""
    model = Model(blocks=stages * 2)
    pipeline = lanes_of(model, stages)
    held, peak = [0] * stages, [0] * stages
    for stage in range(stages):
        block = model.blocks[stage * 2]

        def count(module: nn.Module, args: object, output: torch.Tensor, stage: int = stage) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # the checkpoint's second run
            held[stage] += 1
            peak[stage] = max(peak[stage], held[stage])
            output.register_hook(lambda grad: held.__setitem__(stage, held[stage] - 1))

        block.register_forward_hook(count, prepend=True)
    run(pipeline, model, 10)
    assert peak == [stages - stage for stage in range(stages)]
    assert held == [0] * stages


def test_activations_that_checkpoints_offload_leave_the_device_while_their_lane_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offload, original = CheckpointOffload(min_bytes=0), checkpoint

    def offloaded(*args: object, **kwargs: object) -> torch.Tensor:
        with offload.saving():
            return original(*args, **kwargs)

    monkeypatch.setattr(f"{__name__}.checkpoint", offloaded)
    plain, model = Model(8), Model(8)
    for one in (plain, model):
        one.embed.requires_grad_(False)  # as with LoRA: autograd's graph is cut behind every block
    torch.manual_seed(2)
    plain(data(0)).backward()
    pipeline = lanes_of(model)
    held: list[StorageWeakRef] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: held.append(StorageWeakRef(out.untyped_storage())))
    torch.manual_seed(2)
    loss = pipeline.submit(partial(model, data(0)))
    loss.wait()
    assert len(held) == 8
    assert sum(not one.expired() for one in held) <= IN_FLIGHT + 1  # those on their way, and what the head keeps
    pipeline.backward(loss, torch.Tensor.backward)
    pipeline.join()
    for name, parameter in plain.named_parameters():
        found = dict(model.named_parameters())[name].grad
        assert parameter.grad is None if found is None else torch.equal(found, parameter.grad), name


class Faulty(RuntimeError):
    pass


def fail(*args: object) -> None:
    raise Faulty("this one")


@pytest.mark.parametrize("where", ["prologue", "first stage", "last stage", "loss", "backward", "start"])
@pytest.mark.parametrize("number", [0, 2, 4])
def test_error_in_a_lane_is_raised_by_the_caller_and_nobody_hangs(where: str, number: int) -> None:
    model = Model()
    pipeline = lanes_of(model)

    def forward(k: int) -> torch.Tensor:
        if k == number and where == "prologue":
            fail()
        if k == number and where in ("first stage", "last stage"):
            block = model.blocks[0 if where == "first stage" else -1]
            handle = block.register_forward_pre_hook(fail)
        try:
            loss = model(data(k))
        finally:
            if k == number and where in ("first stage", "last stage"):
                handle.remove()
        if k == number and where == "backward":
            loss.register_hook(fail)
        if k == number and where == "loss":
            fail()
        return loss

    def go() -> None:
        for k in range(5):
            loss = pipeline.submit(partial(forward, k))
            pipeline.backward(loss, fail if k == number and where == "start" else torch.Tensor.backward)
        pipeline.join()

    with pytest.raises(Faulty, match="this one"):
        go()
    with pytest.raises(Faulty):  # and whoever goes on regardless hears it again
        pipeline.submit(partial(model, data(0)))
    pipeline.remove()


def test_error_of_a_lane_keeps_its_cause_and_nothing_of_the_frames_it_comes_from() -> None:
    model = Model()
    pipeline = lanes_of(model)
    held: list[weakref.ref[torch.Tensor]] = []

    def forward() -> torch.Tensor:
        activation = torch.ones(4)
        held.append(weakref.ref(activation))
        try:
            fail()
        except Faulty as error:
            raise ValueError("while that was handled") from error
        return activation

    with pytest.raises(ValueError, match="while that was handled") as caught:
        pipeline.submit(forward)
    pipeline.remove()
    assert isinstance(caught.value.__cause__, Faulty)
    assert caught.value.__context__ is caught.value.__cause__
    assert held[0]() is None


def test_lanes_removed_in_flight_let_their_threads_go() -> None:
    model = Model()
    pipeline = lanes_of(model)
    pipeline.submit(partial(model, data(0)))
    pipeline.submit(partial(model, data(1)))
    pipeline.remove()
    assert not any(m._forward_hooks for m in model.blocks[:2])


def ends(act: Callable[[], object]) -> object:
    """What `act` returns or raises, from a thread that does not hold the test if it never does."""
    answers: queue.Queue[object] = queue.Queue()

    def call() -> None:
        try:
            answers.put(act())
        except BaseException as error:
            answers.put(error)

    threading.Thread(target=call, daemon=True).start()
    return answers.get(timeout=60)


@pytest.mark.parametrize("stages", [2, 3])
def test_forwards_that_wait_for_a_backward_nobody_asks_for_are_an_error(stages: int) -> None:
    model = Model()
    pipeline = lanes_of(model, stages)
    error = ends(lambda: [pipeline.submit(partial(model, data(number))) for number in range(stages + 2)])
    assert isinstance(error, WanshimError)
    assert f"the caller waits for the start of micro-batch {stages}" in str(error)
    assert "wanshim micro-batch 0 waits for the backward of micro-batch 0 to be asked for" in str(error)
    assert f"wanshim micro-batch {stages} waits for its forward on stage 0" in str(error)


def test_loss_read_before_an_earlier_backward_was_asked_for_is_an_error() -> None:
    model = Model()
    pipeline = lanes_of(model)

    def read() -> float:
        losses = [pipeline.submit(partial(model, data(number))) for number in range(3)]
        return losses[2].item()

    error = ends(read)
    assert isinstance(error, WanshimError)
    assert "the caller waits for the loss of micro-batch 2" in str(error)


def test_loss_read_by_another_thread_while_the_caller_works_waits_for_the_caller() -> None:
    model = Model()
    pipeline = lanes_of(model)
    losses, waiting, read = (
        [pipeline.submit(partial(model, data(number))) for number in range(3)],
        threading.Event(),
        [],
    )
    wait = pipeline.schedule._changed.wait

    def note(timeout: float | None = None) -> bool:
        if threading.current_thread() is reader:
            waiting.set()
        return wait(timeout)

    pipeline.schedule._changed.wait = note
    reader = threading.Thread(target=lambda: read.append(losses[2].item()), daemon=True)
    reader.start()
    assert waiting.wait(60)
    for loss in losses:
        pipeline.backward(loss, torch.Tensor.backward)
    pipeline.join()
    reader.join(60)
    assert read == [losses[2].item()]


def test_micro_batch_whose_end_goes_wrong_still_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def go_wrong(error: BaseException) -> None:
        raise RuntimeError("while letting go")

    monkeypatch.setattr("wanshim.core.pipeline.micro_batch._end_frames", go_wrong)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    model = Model()
    pipeline = lanes_of(model)

    def fail() -> torch.Tensor:
        raise ValueError("first")

    error = ends(lambda: pipeline.submit(fail).item())
    assert isinstance(error, ValueError)
    assert str(error) == "first"


def test_micro_batch_that_never_began_does_not_hold_the_join(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    pipeline = lanes_of(model)
    pipeline.backward(pipeline.submit(partial(model, data(0))), torch.Tensor.backward)

    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pipeline.submit(partial(model, data(1)))
    error = ends(pipeline.join)
    assert isinstance(error, RuntimeError)
    assert "can't start new thread" in str(error)


def test_loss_without_a_backward_is_an_error_at_the_join() -> None:
    model = Model()
    pipeline = lanes_of(model)
    pipeline.submit(partial(model, data(0)))
    with pytest.raises(WanshimError, match=r"no backward was asked for micro-batches \[0\]"):
        pipeline.join()


@pytest.mark.parametrize("times", [0, 2])
def test_forward_that_does_not_pass_the_blocks_once_is_refused(times: int) -> None:
    model = Model()
    pipeline = lanes_of(model)

    def go() -> None:
        loss = pipeline.submit(lambda: sum((model(data(0)) for _ in range(times)), torch.zeros(())))
        pipeline.backward(loss, torch.Tensor.backward)
        pipeline.join()

    with pytest.raises(WanshimError, match="WANSHIM_PIPELINE=0"):
        go()


def test_pending_loss_behaves_as_the_loss_and_can_be_read_before_the_join() -> None:
    plain, model = Model(), Model()
    pipeline = lanes_of(model, 3)
    torch.manual_seed(1)
    expected = [plain(data(k)).item() for k in range(4)]
    torch.manual_seed(1)
    for k in range(4):
        loss = pipeline.submit(partial(model, data(k)))
        pipeline.backward(loss, torch.Tensor.backward)
        assert loss.item() == expected[k]
        assert float(loss) == expected[k]
        assert (loss * 2).detach().float().mean().item() == expected[k] * 2
        assert f"{loss:.3f}" == f"{expected[k]:.3f}"
    pipeline.join()


def test_backward_work_of_the_caller_runs_in_the_order_of_submission() -> None:
    model = Model()
    pipeline = lanes_of(model, 3)
    begun: list[int] = []
    for k in range(6):
        loss = pipeline.submit(partial(model, data(k)))
        pipeline.backward(loss, lambda real, k=k: (begun.append(k), real.backward()))
    pipeline.join()
    assert begun == list(range(6))


def test_autocast_of_the_caller_holds_in_the_micro_batch() -> None:
    model = Model()
    pipeline = lanes_of(model)
    seen: list[torch.dtype] = []
    model.blocks[3].linear.register_forward_hook(lambda m, a, o: seen.append(o.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(pipeline, model, 1)
    assert seen[0] == torch.bfloat16


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("block", range(6))
def test_loss_that_reads_what_a_block_computes_is_an_error(block: int, shares: bool) -> None:
    """As features of a block that are compared with another model's. No gradient would come to the blocks before."""
    model, seen = Model(), list[torch.Tensor]()
    model.embed.requires_grad_(shares)  # each block ends a graph, or each stage
    model.blocks[block].linear.register_forward_hook(lambda module, args, output: seen.append(output))
    pipeline = lanes_of(model)
    for weight in (False, True):
        seen.clear()
        with pytest.raises(WanshimError, match="depends on what a block computes") if weight else nullcontext():
            loss = pipeline.submit(lambda weight=weight: model(data(0)) + (seen[0].mean() if weight else 0))
            pipeline.backward(loss, torch.Tensor.backward)
            pipeline.join()
    pipeline.remove()


def test_model_that_drops_out_at_random_is_refused_by_name() -> None:
    model = Model()
    assert refusal(model) is None
    model.blocks[2].add_module("drop", nn.Dropout(0.1))
    assert "blocks.2.drop" in str(refusal(model))


@pytest.mark.gpu(1)
def test_streams_reuse_no_memory_that_another_still_reads() -> None:
    """Many rounds of uneven work on one device twice: memory freed too early would show as other bits."""
    torch.manual_seed(0)
    model, plain = Model(12).cuda(), Model(12).cuda()
    pipeline = Pipeline(split_model(model, ["cuda:0", "cuda:0"], blocks="blocks", exits=("head",)))
    for _ in range(20):
        torch.manual_seed(3)
        for k in range(5):
            plain(data(k).cuda().repeat(40000, 1)).backward()
        torch.manual_seed(3)
        losses = []
        for k in range(5):
            big = data(k).cuda().repeat(40000, 1)
            loss = pipeline.submit(partial(model, big), big)
            del big
            pipeline.backward(loss, torch.Tensor.backward)
            losses.append(loss)
        pipeline.join()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, dict(plain.named_parameters())[name].grad), name
