"""The order of copies and computation on a device with streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.fake_streams import Stream, Streams
from tests.unit.streaming.model import BLOCKS, Model, data
from wanshim.core.streaming import stream_model
from wanshim.core.streaming.ring import Ring
from wanshim.errors import WanshimError


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    with Streams(monkeypatch) as streams:
        yield streams


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def ring(model: Model, streams: Streams) -> Ring:
    ring = stream_model(model, "cpu", count=BLOCKS).ring
    ring._loads = Stream("loads")
    streams.copies.clear()
    streams.compute.behind.clear()
    return ring


@torch.no_grad()
def test_block_computes_after_its_own_copy_while_the_next_one_is_copied(streams: Streams, ring: Ring) -> None:
    ring.acquire(0)
    assert [(copy.stream, copy.waits) for copy in streams.copies] == [("loads", False)] * 2
    assert "copy 0" in streams.compute.behind
    assert "copy 1" not in streams.compute.behind
    ring.acquire(1)
    assert "copy 1" in streams.compute.behind
    assert "copy 2" not in streams.compute.behind
    assert (ring.count.loads, ring.count.late) == (3, 1)
    assert ring.count.loaded_bytes == sum(block.num_bytes for block in ring.blocks[:3])


@torch.no_grad()
def test_slot_is_filled_again_after_the_block_in_it_has_computed(streams: Streams, ring: Ring) -> None:
    for index in range(4):
        ring.acquire(index)
        streams.compute.work(f"block {index}")
    before = [{work for work in copy.behind if work.startswith("block")} for copy in streams.copies]
    assert before == [set(), set(), {"block 0"}, {"block 0", "block 1"}, {"block 0", "block 1", "block 2"}]


@torch.no_grad()
def test_work_on_another_stream_comes_after_that_of_the_blocks_before(streams: Streams, ring: Ring) -> None:
    ring.acquire(0)
    streams.compute.work("block 0")
    other = Stream("other")
    with streams.on(other):
        ring.acquire(1)
        other.work("block 1")
    assert other.behind >= {"block 0", "copy 1"}
    ring.acquire(2)
    assert "block 1" in streams.compute.behind


@torch.no_grad()
def test_each_copy_is_timed_from_its_begin_to_its_end_when_asked(streams: Streams, ring: Ring) -> None:
    ring.acquire(0)
    ring.timed = []
    ring.acquire(1)
    ((begun, ended, num_bytes),) = ring.timed
    assert ended.behind - begun.behind == {"copy 2"}
    assert num_bytes == ring.blocks[2].num_bytes


def test_every_block_of_a_step_computes_after_the_copy_of_its_weights(
    streams: Streams, ring: Ring, model: Model
) -> None:
    at_work = []

    def note(index: int) -> None:
        (slot,) = [slot for slot in ring.slots if slot.index == index]
        at_work.append(slot.ready.behind <= streams.compute.behind)

    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: note(index))  # after that of the ring
    for seed in range(2):
        model(data(seed)).backward()
    assert at_work == [True] * (2 * 2 * BLOCKS)


def test_block_that_comes_late_is_refused_in_the_first_backward_of_a_program_too(ring: Ring) -> None:
    for task in (0, 1):
        ring._check_order(4, task)
        ring._check_order(3, task)
        with pytest.raises(WanshimError, match="one backward came to streamed block 5 after block 3"):
            ring._check_order(5, task)
