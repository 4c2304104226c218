"""Where tensors lie before, during and after streaming, also on devices that this machine lacks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.unit.streaming.model import Model
from wanshim.core.shared.host_memory import PAGE
from wanshim.core.shared.weight_bytes import num_bytes, tensors
from wanshim.core.streaming import stream, stream_model
from wanshim.core.streaming.block_weights import BlockWeights, Weight
from wanshim.core.streaming.ring import Ring
from wanshim.undo import Undo

CPU, META, GPU = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 1)


def addresses(model: nn.Module) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors(model)}


def test_memory_of_a_gpu_is_locked_by_blocks_and_unlocked_when_nothing_lies_in_it_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, events, locked = Model(), [], []

    def lock(memory: torch.Tensor, parts: Sequence[int], device: torch.device) -> object:
        locked.append((memory, list(parts), device))
        inside = range(memory.data_ptr(), memory.data_ptr() + memory.numel())
        return lambda: events.append(("unlock", any(address in inside for address in addresses(model))))

    monkeypatch.setattr(stream, "page_lock", lock)
    monkeypatch.setattr(stream, "_move", lambda *_: None)
    monkeypatch.setattr(stream, "Ring", lambda blocks, host, device, slots: Ring(blocks, host, CPU, slots))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(("synchronize", device)))
    handle = stream_model(model, GPU, count=4)
    begins = [block.begin for block in handle.ring.blocks]
    ((memory, parts, device),) = locked
    assert memory is handle.ring.host.memory
    assert [0, *parts] == begins
    assert [begin % PAGE for begin in begins] == [0] * 4
    assert device == GPU
    offsets = [weight.offset for block in handle.ring.blocks for weight in block.weights]
    assert {offset % 512 for offset in offsets} == {0}  # where CUDA's allocator would lay the weights
    handle.ring.device = GPU
    handle.remove()
    assert events == [("synchronize", GPU), ("unlock", False)]


def test_removal_leaves_alone_what_streaming_did_not_move() -> None:
    model = Model()
    handle = stream_model(model, "cpu", count=4)
    model.to("meta")
    handle.remove()
    assert model.embed.weight.is_meta
    assert not model.blocks[1].base.weight.is_meta


def test_tensors_go_back_to_the_devices_that_they_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    undo, back, model = Undo(), [], Model()
    monkeypatch.setattr(stream, "_put_back", back.extend)
    model.embed.to("meta")
    stream._move(model, META, undo)
    assert all(tensor.is_meta for tensor in tensors(model))
    undo.remove()
    assert {device for _, device in back} == {CPU}
    assert len(back) == len(list(tensors(model.blocks)))
    monkeypatch.undo()
    place = SimpleNamespace(to=lambda device, **_: device)
    moved, waited = (SimpleNamespace(device=CPU, data=place) for _ in range(2))
    stream._put_back([(moved, GPU)])
    stream._own_again(BlockWeights(0, (Weight(waited, "", 0, place),), 0, 0), [GPU])
    assert moved.data == waited.data == GPU


def test_plan_counts_every_byte_of_the_model_once() -> None:
    plan = stream_model(Model(), "cpu", count=4).plan
    assert plan.resident_bytes + plan.host_bytes == num_bytes(Model())


def test_move_that_fails_leaves_every_tensor_in_its_place() -> None:
    model = Model()
    for block in model.blocks:
        block.shift = nn.Parameter(torch.zeros(12))
    stream_model(model, "cpu", count=4)
    before = list(model.state_dict())

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            raise torch.OutOfMemoryError("the device is full")
        return tensor

    with pytest.raises(torch.OutOfMemoryError):
        model.blocks[1]._apply(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model.blocks[1]._apply(fail, recurse=False)
    assert list(model.state_dict()) == before
