"""The order of copies and computation on a device with streams."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from tests.unit.fake_streams import Stream, Streams
from wanshim.core.offload import CheckpointOffload
from wanshim.core.offload.channel import IN_FLIGHT, Arrival, Channel, Transfer
from wanshim.core.shared.host_memory import Buffer, HostPool
from wanshim.errors import WanshimError

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    with Streams(monkeypatch) as streams:
        yield streams


@pytest.fixture
def channel(streams: Streams) -> Channel:
    channel = Channel(torch.device("cuda"))
    channel._out.name, channel._in.name = "out", "in"
    channel.device = CPU  # its tensors; the streams are those of a GPU
    return channel


def send(channel: Channel, tensor: torch.Tensor) -> Transfer:
    return channel.send(tensor, Buffer(torch.empty(tensor.nbytes, dtype=torch.uint8)))


def test_copy_to_the_host_begins_after_the_tensor_was_computed(streams: Streams, channel: Channel) -> None:
    streams.compute.work("tensor computed")
    transfer = send(channel, torch.arange(4.0))
    (copy,) = streams.copies
    assert (copy.stream, copy.waits) == ("out", False)
    assert "tensor computed" in copy.behind
    assert transfer.sent.behind >= {"copy 0"}
    assert "copy 0" not in streams.compute.behind  # the device goes on meanwhile


def test_buffer_is_written_again_after_its_last_copy_back(streams: Streams, channel: Channel) -> None:
    first = send(channel, torch.arange(4.0))
    channel.fetch(first)
    channel.send(torch.arange(4.0), first.buffer)
    assert "copy 1" in streams.copies[2].behind


def test_sources_are_let_go_in_order_when_two_others_follow_and_later_work_waits_for_their_copies(
    streams: Streams, channel: Channel
) -> None:
    transfers = [send(channel, torch.arange(4.0)) for _ in range(IN_FLIGHT + 2)]
    assert [transfer.source is None for transfer in transfers] == [True, True, *[False] * IN_FLIGHT]
    assert streams.compute.behind & {f"copy {n}" for n in range(4)} == {"copy 0", "copy 1"}
    channel.release_source(transfers[3])  # as of a graph that dies
    channel.release_source(transfers[3])
    assert "copy 3" in streams.compute.behind


def test_copy_back_begins_after_the_copy_out_and_after_the_work_that_is_issued(
    streams: Streams, channel: Channel
) -> None:
    transfer = send(channel, torch.arange(4.0))
    streams.compute.work("memory used before")
    arrival = channel.fetch(transfer)
    back = streams.copies[1]
    assert (back.stream, back.waits) == ("in", False)
    assert back.behind >= {"copy 0", "memory used before"}
    assert "copy 1" not in streams.compute.behind
    assert torch.equal(channel.receive(arrival), torch.arange(4.0))
    assert "copy 1" in streams.compute.behind
    assert streams.kept == []


def test_tensor_received_on_another_stream_is_readable_there_and_its_memory_is_kept_for_it(
    streams: Streams, channel: Channel
) -> None:
    arrival, other = channel.fetch(send(channel, torch.arange(4.0))), Stream("other")
    with streams.on(other):
        tensor = channel.receive(arrival)
    assert "copy 1" in other.behind
    assert streams.kept == [(tensor.data_ptr(), other)]


def test_memory_of_an_arrival_that_nobody_wants_is_used_again_after_its_copy(
    streams: Streams, channel: Channel
) -> None:
    arrival = channel.fetch(send(channel, torch.arange(4.0)))
    with streams.on(Stream("other")):  # whoever comes next after the graph has died
        channel.drop(arrival)
    assert "copy 1" in streams.compute.behind


def test_without_streams_everything_is_there_at_once() -> None:
    channel = Channel(CPU)
    arrival = channel.fetch(send(channel, torch.arange(4.0)))
    assert torch.equal(channel.receive(arrival), torch.arange(4.0))
    channel.drop(arrival)


def test_channel_of_a_gpu_has_that_gpus_streams_and_hands_tensors_out_on_it(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a split model the current device is that of another stage."""
    own, asked = torch.device("cuda", 1), []

    def stream(device: torch.device) -> Stream:
        asked.append(device)
        return streams.compute

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    offload = CheckpointOffload()
    channel = offload._channel(own)
    transfer = send(channel, torch.arange(4.0))
    channel.device = torch.device("meta")  # has memory here, as cuda:1 has not
    assert channel.fetch(transfer).tensor.is_meta
    assert asked == [own, own, own, torch.device("meta")]  # out, in, the sender's and the receiver's
    assert offload._channel(own) is channel
    assert offload._channel(torch.device("cuda", 0)) is not channel


@pytest.fixture
def offload(channel: Channel) -> CheckpointOffload:
    offload = CheckpointOffload(min_bytes=0)
    offload._channels[CPU] = channel
    return offload


def test_tensors_return_each_while_the_one_saved_after_it_is_in_use(
    streams: Streams, offload: CheckpointOffload
) -> None:
    values = [torch.full((4,), float(n)) for n in range(6)]
    held = [offload.pack(value) for value in values]
    assert [copy.stream for copy in streams.copies] == ["out"] * 6
    begun = []
    for saved, value in zip(reversed(held), reversed(values), strict=True):
        assert torch.equal(offload.unpack(saved), value)
        begun.append(sum(copy.stream == "in" for copy in streams.copies))
    assert begun == [0, 1, 2, 3, 4, 4]  # of those still on the device none; the last has none before it
    assert (offload.count.stayed, offload.count.ahead, offload.count.on_demand) == (2, 4, 0)
    assert (offload.count.sent, offload.count.sent_bytes, offload.count.shared) == (6, 6 * 16, 0)


@pytest.mark.parametrize(
    ("value", "stride"),
    [
        (torch.arange(24.0).view(4, 6).t(), (1, 6)),  # dense: kernels see the layout that they saw in forward
        (torch.arange(48.0).view(4, 12)[:, ::2], (6, 1)),
    ],
    ids=["turned", "every second column"],
)
def test_tensor_that_is_not_contiguous_comes_back_with_its_values(
    value: torch.Tensor, stride: tuple[int, ...], offload: CheckpointOffload
) -> None:
    held = [offload.pack(value), *(offload.pack(torch.ones(4)) for _ in range(IN_FLIGHT))]
    found = offload.unpack(held[0])
    assert torch.equal(found, value)
    assert found.stride() == stride


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool], ids=str)
def test_tensor_comes_back_in_its_dtype(dtype: torch.dtype, offload: CheckpointOffload) -> None:
    value = torch.arange(4).to(dtype)
    held = [offload.pack(value), *(offload.pack(torch.ones(4)) for _ in range(IN_FLIGHT))]
    found = offload.unpack(held[0])
    assert found.dtype == dtype
    assert torch.equal(found, value)


@pytest.mark.parametrize("others", [0, 1, IN_FLIGHT], ids=["on the device", "on its way", "on the host"])
@pytest.mark.parametrize("step", [1, 2], ids=["dense", "strided"])
def test_tensor_written_to_before_it_was_saved_comes_back(others: int, step: int, offload: CheckpointOffload) -> None:
    value = torch.ones(8).add_(1)[::step]
    held = [offload.pack(value), *(offload.pack(torch.ones(4)) for _ in range(others))]
    assert torch.equal(offload.unpack(held[0]), value)


def test_tensor_written_to_before_two_blocks_saved_it_comes_back(offload: CheckpointOffload) -> None:
    value = torch.ones(4).add_(1)
    saved = offload.pack(value)
    assert offload.pack(value) is saved
    assert offload.unpack(saved) is value


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "ahead"])
def test_tensor_that_came_back_is_readable_by_later_work_and_its_memory_is_free_after_it(
    ahead: bool, streams: Streams, offload: CheckpointOffload
) -> None:
    """A graph that is kept for a second backward keeps what is on the host, not what came back to the device."""
    held = [offload.pack(torch.full((4,), float(n))) for n in range(IN_FLIGHT + 2)]
    if ahead:
        offload.unpack(held[1])
    for _ in range(2):
        tensor = offload.unpack(held[0])
        assert torch.equal(tensor, torch.zeros(4))
        assert f"copy {len(streams.copies) - 1}" in streams.compute.behind
        gone = weakref.ref(tensor)
        del tensor
        assert gone() is None


def test_tensor_saved_again_on_its_way_back_stays_and_what_was_fetched_is_free_after_the_copy(
    streams: Streams, offload: CheckpointOffload
) -> None:
    value = torch.ones(4)
    held = [offload.pack(value), *(offload.pack(torch.full((4,), float(n))) for n in range(IN_FLIGHT + 1))]
    offload.unpack(held[1])  # `value` is on its way back
    back, gone = f"copy {len(streams.copies) - 1}", weakref.ref(held[0].arrival.tensor)
    assert back not in streams.compute.behind
    assert offload.pack(value) is held[0]
    assert back in streams.compute.behind
    assert gone() is None
    assert offload.unpack(held[0]) is value


def test_tensors_of_two_devices_come_back_each_with_those_of_its_device(offload: CheckpointOffload) -> None:
    """The last block of one stage and the first of the next save one after the other."""
    fetched = []

    class Other(Channel):
        def send(self, source: torch.Tensor, buffer: Buffer) -> Transfer:
            return Transfer(None, 0, source, buffer, None)

        def fetch(self, transfer: Transfer) -> Arrival:
            fetched.append(transfer.like)
            return Arrival(transfer.like, None, None)

    other = torch.device("meta")
    offload._pools["meta"], offload._channels[other] = HostPool(locked=False), Other(other)
    on_other = [torch.empty(4, device=other) for _ in range(2)]
    held = []
    for value in on_other:
        held += [offload.pack(value), offload.pack(torch.ones(4))]
    offload.unpack(held[2])
    assert list(map(id, fetched)) == list(map(id, reversed(on_other)))


def test_tensor_asked_for_out_of_turn_is_fetched_on_demand(offload: CheckpointOffload) -> None:
    held = [offload.pack(torch.full((4,), float(n))) for n in range(IN_FLIGHT + 1)]
    assert torch.equal(offload.unpack(held[0]), torch.zeros(4))
    assert (offload.count.on_demand, offload.count.ahead, offload.count.stayed) == (1, 0, 0)


def test_tensor_on_its_way_back_is_not_fetched_again(streams: Streams, offload: CheckpointOffload) -> None:
    held = [offload.pack(torch.ones(4)) for _ in range(IN_FLIGHT + 1)]
    for _ in range(2):  # as in a second backward through a kept graph
        offload.unpack(held[1])
    assert [copy.stream for copy in streams.copies] == ["out"] * len(held) + ["in"]


def test_buffer_of_a_graph_that_dies_is_used_again_after_the_copy_back_that_nobody_wants(
    streams: Streams, offload: CheckpointOffload
) -> None:
    held = [offload.pack(torch.full((4,), float(n))) for n in range(IN_FLIGHT + 2)]
    offload.unpack(held[1])  # that of held[0] is on its way back
    (back,) = [n for n, copy in enumerate(streams.copies) if copy.stream == "in"][1:]
    assert f"copy {back}" not in streams.compute.behind
    del held
    offload.clear()
    assert f"copy {back}" in streams.compute.behind


def test_tensor_that_stayed_is_passed_over_when_the_next_is_fetched_ahead(
    streams: Streams, offload: CheckpointOffload
) -> None:
    shared = torch.ones(4)
    held = [offload.pack(torch.zeros(4)), offload.pack(shared)]
    held += [offload.pack(torch.full((4,), 2.0)) for _ in range(IN_FLIGHT + 1)]
    assert offload.pack(shared) is held[1]
    offload.unpack(held[2])
    assert torch.equal(offload.unpack(held[0]), torch.zeros(4))
    assert (offload.count.ahead, offload.count.on_demand) == (1, 1)


@pytest.mark.parametrize("others", [0, IN_FLIGHT], ids=["on the device", "on its way"])
def test_tensor_written_to_before_its_copy_was_whole_stops_the_backward(
    others: int, offload: CheckpointOffload
) -> None:
    """Its copy on the host may hold either value, or some of each."""
    value = torch.ones(4)
    saved = offload.pack(value)
    value.add_(1)
    kept = [offload.pack(torch.ones(4)) for _ in range(others)]
    with pytest.raises(WanshimError, match="was written to"):
        offload.unpack(saved)
    assert len(kept) == others


def test_tensor_that_another_block_saves_too_stays_and_its_buffer_is_used_again_after_the_copy(
    streams: Streams, offload: CheckpointOffload
) -> None:
    value = torch.ones(4)
    saved = offload.pack(value)
    assert offload.pack(value) is saved
    assert "copy 0" in streams.compute.behind
    assert offload.unpack(saved) is value
    held = offload.host_bytes
    again = offload.pack(torch.zeros(4))
    assert offload.host_bytes == held
    assert torch.equal(offload.unpack(again), torch.zeros(4))
    assert (offload.count.sent, offload.count.shared) == (2, 1)
