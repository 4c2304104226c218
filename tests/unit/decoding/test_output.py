"""Who receives frames, and how regions of several ranks become blocks of frames."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanshim.core.decoding.ranks.output import (
    ChunkPump,
    OutputSpec,
    Region,
    Sink,
    check_receivers,
    read_receivers,
)
from wanshim.errors import ModelInvalid, RanksFailed

CPU, SHAPE = torch.device("cpu"), (1, 3, 4, 2, 6)
LEFT, RIGHT = Region(rank=0, rows=(0, 2), columns=(0, 4)), Region(rank=1, rows=(0, 2), columns=(4, 6))


@pytest.mark.parametrize(
    ("output", "ranks"), [("all", None), (0, (0,)), ("rank0", (0,)), ("rank12", (12,)), ((0, 2), (0, 2)), ([3], (3,))]
)
def test_output_names_ranks(output: Any, ranks: tuple[int, ...] | None) -> None:
    assert read_receivers(output) == ranks


@pytest.mark.parametrize("output", [-1, True, 1.0, "rank", "rank1 ", "rank-1", "none", (), (0, 0), (0, "1"), None])
def test_output_that_names_no_ranks_is_refused(output: Any) -> None:
    with pytest.raises(ModelInvalid, match="a rank of the group"):
        read_receivers(output)


def test_rank_beyond_the_group_is_refused() -> None:
    check_receivers(None, 1)
    check_receivers((0, 3), 4)
    with pytest.raises(ModelInvalid, match=r"output names rank 4 of a group of 4\. Expected ranks 0 to 3"):
        check_receivers((4, 0), 4)


class Comm:
    """One of two ranks; the other's part of what is received is made of nines."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self.deadline = rank, 2, 60.0
        self.sent: list[tuple[torch.Tensor, int]] = []
        self.steps: list[str] = []

    def exchange(self, step: str, sends: list[Any], receives: list[Any]) -> None:
        self.steps.append(step)
        self.sent += sends
        for buffer, peer in receives:
            assert peer == 1 - self.rank
            buffer.fill_(9.0)


def sink(comm: Comm, **options: Any) -> Sink:
    return Sink(comm, OutputSpec(**options), SHAPE, lambda values, dtype: (values + 1).to(dtype), torch.float32, CPU)


def test_receiver_puts_its_own_region_and_those_of_others_in_their_place() -> None:
    comm = Comm(0)
    collected = sink(comm, ranks=(0,))
    for frames in ((0, 1), (1, 4)):
        mine = collected.finish(torch.full((1, 3, frames[1] - frames[0], 2, 4), float(frames[0])))
        collected.deliver(frames, [LEFT, RIGHT], [mine])
    video = collected.close()
    assert video[0, 0, :, 0].tolist() == [[1.0] * 4 + [9.0] * 2, *[[2.0] * 4 + [9.0] * 2] * 3]
    assert comm.sent == []
    assert comm.steps == ["output of frames 0 to 1", "output of frames 1 to 4"]


@pytest.mark.parametrize(("ranks", "to"), [((0,), [0]), (None, [0]), ((1,), [])])
def test_rank_sends_its_region_to_every_other_receiver(ranks: tuple[int, ...] | None, to: list[int]) -> None:
    comm = Comm(1)
    collected = sink(comm, ranks=ranks)
    mine = torch.full((1, 3, 4, 2, 2), 5.0)
    collected.deliver((0, 4), [LEFT, RIGHT], [mine])
    assert [peer for _, peer in comm.sent] == to
    assert all(torch.equal(part, mine) and part.is_contiguous() for part, _ in comm.sent)
    assert (collected.close() is None) is (ranks == (0,))


def test_output_in_uint8_is_asked_of_the_network_in_uint8() -> None:
    assert sink(Comm(0), uint8=True).finish(torch.zeros(1)).dtype == torch.uint8
    assert sink(Comm(0), uint8=True).video.dtype == torch.uint8


def test_callback_gets_blocks_on_receivers_alone_and_no_video_is_kept() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    receiving = sink(Comm(0), ranks=(0,), on_chunk=lambda block, start: seen.append((start, tuple(block.shape))))
    assert receiving.video is None
    receiving.deliver((1, 4), [LEFT, RIGHT], [torch.zeros(1, 3, 3, 2, 4)])
    assert receiving.close() is None
    assert seen == [(1, (1, 3, 3, 2, 6))]
    other = sink(Comm(1), ranks=(0,), on_chunk=lambda block, start: seen.append((start, ())))
    assert other.pump is None
    other.cancel()
    assert other.close() is None


def test_callback_that_hangs_ends_the_decode_at_its_deadline_with_as_many_blocks_queued_as_asked() -> None:
    began, gate, comm = threading.Event(), threading.Event(), Comm(0)
    comm.deadline = 0.05

    def stuck(block: torch.Tensor, start: int) -> None:
        began.set()
        gate.wait(60)

    receiving = sink(comm, ranks=(0,), on_chunk=stuck, depth=3)
    receiving.deliver((0, 1), [LEFT, RIGHT], [torch.zeros(1, 3, 1, 2, 4)])
    assert began.wait(60)
    for frames in ((1, 2), (2, 3), (3, 4)):
        receiving.deliver(frames, [LEFT, RIGHT], [torch.zeros(1, 3, 1, 2, 4)])
    with pytest.raises(RanksFailed, match=r"on_chunk took no block for 0\.05 s"):
        receiving.deliver((0, 1), [LEFT, RIGHT], [torch.zeros(1, 3, 1, 2, 4)])
    gate.set()
    receiving.cancel()


def test_pump_after_an_error_takes_and_drops_blocks_and_raises_it() -> None:
    def refuse(block: torch.Tensor, start: int) -> None:
        calls.append(start)
        raise ValueError("the disk is full")

    calls: list[int] = []
    pump = ChunkPump(refuse, depth=4, patience=60.0)

    def put_many() -> None:
        for start in range(10):  # the queue has room for four
            pump.put(torch.zeros(1), start)

    with pytest.raises(ValueError, match="the disk is full"):
        put_many()
    with pytest.raises(ValueError, match="the disk is full"):
        pump.close()
    assert calls == [0]


def test_cancelled_pump_calls_nobody_any_more() -> None:
    began, gate, calls = threading.Event(), threading.Event(), []

    def slow(block: torch.Tensor, start: int) -> None:
        calls.append(start)
        began.set()
        gate.wait(60)

    pump = ChunkPump(slow, depth=2, patience=60.0)
    pump.put(torch.zeros(1), 0)
    assert began.wait(60)
    pump.put(torch.zeros(1), 1)
    pump.cancel()
    gate.set()
    pump._thread.join(60)
    assert not pump._thread.is_alive()
    assert calls == [0]


def test_block_on_a_gpu_is_read_after_the_work_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    event = SimpleNamespace(record=lambda: log.append("recorded"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append(f"on {device}"))
    stream = SimpleNamespace(wait_event=lambda waited: log.append(f"waits {waited is event}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    pump = ChunkPump(lambda block, start: log.append(f"called {start}"), depth=2, patience=60.0)
    pump.put(SimpleNamespace(is_cuda=True, device="cuda:1"), 3)  # type: ignore[arg-type]
    pump.close()
    assert log[0] == "recorded"
    assert log[1:] == ["on cuda:1", "waits True", "called 3"]
