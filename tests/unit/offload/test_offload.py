"""Checkpoint offload on the host, where the buffers are plain memory and every copy is real."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from wanshim.core.offload import CheckpointOffload
from wanshim.core.offload.channel import IN_FLIGHT
from wanshim.core.shared import host_memory
from wanshim.core.shared.host_memory import HostPool, is_dense
from wanshim.errors import WanshimError

BLOCKS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, shared: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * shared) + turned.sum(0)


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(BLOCKS))


def step(blocks: nn.ModuleList, saving: Callable[[], AbstractContextManager[object]], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 16, generator=generator, requires_grad=True) * 1.5
    shared, turned = torch.randn(8, 16, generator=generator), torch.randn(16, 4, generator=generator).t()[:, ::1]
    for block in blocks:
        with saving():
            x = checkpoint(block, x, shared, turned, use_reentrant=False)
    loss = x.pow(2).mean()
    loss.backward()
    return loss.detach()


def gradients(blocks: nn.ModuleList) -> list[torch.Tensor]:
    return [p.grad for p in blocks.parameters() if p.grad is not None]


@pytest.mark.parametrize("other", [nullcontext, save_on_cpu])
def test_offload_gives_the_gradients_of_none_and_of_save_on_cpu(
    other: Callable[[], AbstractContextManager[object]],
) -> None:
    expected, found, offload = model(), model(), CheckpointOffload(min_bytes=0)
    for seed in range(2):
        assert torch.equal(step(expected, other, seed), step(found, offload.saving, seed))
    assert len(gradients(found)) == 2 * BLOCKS
    assert all(map(torch.equal, gradients(expected), gradients(found)))
    assert offload.count.sent > 2 * BLOCKS


def test_tensor_that_all_blocks_share_travels_at_most_once() -> None:
    offload = CheckpointOffload(min_bytes=0)
    step(model(), offload.saving)
    assert offload.count.sent == BLOCKS + 2  # each block's x, and shared and turned once
    assert offload.count.shared == 2 * (BLOCKS - 1)


def test_tensor_comes_back_before_its_block_asks_for_it() -> None:
    offload = CheckpointOffload(min_bytes=0)
    step(model(), offload.saving)
    assert offload.count.on_demand <= 1
    assert offload.count.ahead >= BLOCKS - 3
    assert offload.count.ahead + offload.count.on_demand + offload.count.stayed >= BLOCKS


def test_buffers_are_used_again_by_the_next_step() -> None:
    offload, blocks = CheckpointOffload(min_bytes=0), model()
    step(blocks, offload.saving)
    held = offload.host_bytes
    for seed in range(3):
        step(blocks, offload.saving, seed)
    assert offload.host_bytes == held > 0
    offload.clear()
    assert offload.host_bytes == 0


def test_tensor_that_has_not_left_comes_back_as_itself() -> None:
    offload, value = CheckpointOffload(min_bytes=0), torch.ones(8, 16)
    assert offload.unpack(offload.pack(value)) is value
    assert (offload.count.stayed, offload.count.on_demand) == (1, 0)


def test_small_tensors_stay_where_they_are() -> None:
    offload = CheckpointOffload(min_bytes=10_000)
    step(model(), offload.saving)
    assert offload.count.sent == offload.host_bytes == 0


def test_tensor_of_a_mebibyte_travels_by_default_and_a_smaller_one_stays() -> None:
    offload = CheckpointOffload()
    small, large = torch.zeros(2**18 - 1), torch.zeros(2**18)
    assert offload.pack(small) is small
    assert offload.pack(large) is not large
    assert offload.host_bytes == 2**20


def test_shared_input_that_is_written_to_stops_the_backward() -> None:
    offload, blocks = CheckpointOffload(min_bytes=0), model()
    x, shared = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    turned = torch.zeros(4, 16)
    for block in blocks[:3]:
        with offload.saving():
            x = checkpoint(block, x, shared, turned, use_reentrant=False)
    shared.add_(1)
    with pytest.raises(WanshimError, match=r"shape \(8, 16\) on cpu was written to"):
        x.sum().backward()


def test_changed_tensor_is_another_tensor() -> None:
    """One buffer rewritten between two blocks: each block gets back what it was given."""
    offload = CheckpointOffload(min_bytes=0)
    value = torch.ones(8, 16)
    held = [offload.pack(value)]
    value.add_(1)
    held.append(offload.pack(value))
    assert held[0] is not held[1]
    assert [offload.unpack(saved)[0, 0].item() for saved in held] == [1.0, 2.0]


def test_views_of_one_buffer_come_back_each_as_itself() -> None:
    """They agree in storage, version, shape and strides: only the offset tells them apart."""
    buffer = torch.arange(2 * 8 * 16, dtype=torch.float32).view(2, 8, 16)
    offload = CheckpointOffload(min_bytes=0)
    held = [offload.pack(view) for view in buffer]
    assert all(map(torch.equal, map(offload.unpack, held), buffer))


@pytest.mark.parametrize("view", [torch.Tensor.t, lambda x: x.view(torch.int32)], ids=["transposed", "other dtype"])
def test_view_of_the_same_place_comes_back_as_itself(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Both begin where the buffer begins and have its shape: only strides or dtype tell them apart."""
    buffer = torch.arange(16 * 16, dtype=torch.float32).view(16, 16)
    offload = CheckpointOffload(min_bytes=0)
    held = [offload.pack(buffer), offload.pack(view(buffer))]
    assert torch.equal(offload.unpack(held[0]), buffer)
    assert torch.equal(offload.unpack(held[1]), view(buffer))
    assert offload.unpack(held[1]).dtype == view(buffer).dtype


def test_view_that_ends_elsewhere_comes_back_as_itself() -> None:
    """They agree in storage, version, offset and strides: only the shape tells them apart."""
    buffer = torch.arange(8.0)
    offload = CheckpointOffload(min_bytes=0)
    held = [offload.pack(buffer[:n]) for n in (8, 4)]
    assert [offload.unpack(saved).tolist() for saved in held] == [buffer.tolist(), buffer[:4].tolist()]


def test_learned_input_of_a_block_travels_and_gets_its_gradient() -> None:
    offload, learned = CheckpointOffload(min_bytes=0), nn.Parameter(torch.ones(4))
    with offload.saving():
        squared = learned.square()
    squared.sum().backward()
    assert offload.count.sent == 1
    assert torch.equal(learned.grad, torch.full((4,), 2.0))


def test_view_takes_its_own_bytes_of_host_memory() -> None:
    offload = CheckpointOffload(min_bytes=0)
    offload.pack(torch.ones(1024)[:4])
    assert offload.host_bytes == 16


def test_tensor_in_the_memory_of_one_that_left_is_another_tensor() -> None:
    """When a tensor is on the host, the allocator gives its memory to another block's: one address, dtype and shape."""
    memory, offload = bytearray(16), CheckpointOffload(min_bytes=0)
    held = []
    for value in (1, 2):
        memory[:] = bytes([value]) * 16
        held.append(offload.pack(torch.frombuffer(memory, dtype=torch.uint8)))
        held += [offload.pack(torch.ones(4)) for _ in range(IN_FLIGHT)]  # it leaves
    assert offload.unpack(held[0]).tolist() == [1] * 16
    assert offload.unpack(held[1 + IN_FLIGHT]).tolist() == [2] * 16


@pytest.mark.parametrize("call", ["pack", "unpack", "clear"])
def test_memory_of_a_graph_that_died_is_free_after_the_next_call(call: str) -> None:
    offload = CheckpointOffload(min_bytes=0)
    value, other = torch.ones(4), torch.zeros(4)
    dead, kept = offload.pack(value), offload.pack(other)
    gone = weakref.ref(value)
    del dead, value
    assert gone() is not None  # nobody waits for the copy where a graph dies
    arguments = {"pack": [torch.ones(2)], "unpack": [kept], "clear": []}
    getattr(offload, call)(*arguments[call])
    assert gone() is None


def test_threads_fetch_ahead_what_they_saved_themselves() -> None:
    offload = CheckpointOffload(min_bytes=0)
    held = []
    for n in range(2 + IN_FLIGHT):
        held.append(offload.pack(torch.full((4,), float(n))))
        other = threading.Thread(target=lambda: held.append(offload.pack(torch.ones(4))))
        other.start()
        other.join(60)
    offload.unpack(held[2])
    assert torch.equal(offload.unpack(held[0]), torch.zeros(4))
    assert (offload.count.on_demand, offload.count.ahead) == (1, 1)


def test_blocks_that_save_views_of_one_buffer_get_their_own_gradients() -> None:
    def step_on_views(blocks: nn.ModuleList, saving: Callable[[], AbstractContextManager[object]]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        x, turned = torch.randn(8, 16, generator=generator), torch.zeros(4, 16)
        buffer = torch.randn(BLOCKS, 8, 16, generator=generator)
        for block, view in zip(blocks, buffer, strict=True):
            with saving():
                x = checkpoint(block, x, view, turned, use_reentrant=False)
        loss = x.pow(2).mean()
        loss.backward()
        return loss.detach()

    expected, found, offload = model(), model(), CheckpointOffload(min_bytes=0)
    assert torch.equal(step_on_views(expected, nullcontext), step_on_views(found, offload.saving))
    assert all(map(torch.equal, gradients(expected), gradients(found)))


def test_forward_that_raises_gives_its_buffers_back() -> None:
    offload, blocks = CheckpointOffload(min_bytes=0), model()
    step(blocks, offload.saving)
    held = offload.host_bytes

    def fail(*args: object) -> None:
        raise ValueError("in the middle")

    hook = blocks[3].register_forward_hook(fail)
    for _ in range(3):
        with pytest.raises(ValueError, match="in the middle"):
            step(blocks, offload.saving)
    hook.remove()
    gc.collect()
    step(blocks, offload.saving)
    assert offload.host_bytes == held


def test_second_backward_through_a_kept_graph_finds_its_inputs() -> None:
    offload, blocks = CheckpointOffload(min_bytes=0), model()
    x, shared, turned = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16), torch.zeros(4, 16)
    y = x
    for block in blocks:
        with offload.saving():
            y = checkpoint(block, y, shared, turned, use_reentrant=False)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)


def test_threads_share_one_offload_without_mixing_tensors() -> None:
    offload = CheckpointOffload(min_bytes=0)
    models = [model() for _ in range(3)]
    losses: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(4):
            models[number].zero_grad()
            losses[number] = step(models[number], offload.saving, number)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for number, blocks in enumerate(models):
        alone = model()
        assert torch.equal(step(alone, nullcontext, number), losses[number])
        assert all(map(torch.equal, gradients(alone), gradients(blocks)))


def test_tensors_that_are_more_than_their_bytes_or_have_none_stay() -> None:
    offload = CheckpointOffload(min_bytes=0)
    quantised = torch.ones(2).as_subclass(type("Quantised", (torch.Tensor,), {}))
    for value in (torch.empty(0), torch.ones(2).to_sparse(), torch.ones(2, device="meta"), quantised):
        assert offload.pack(value) is value


def test_offload_of_the_parent_is_refused_to_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = CheckpointOffload(min_bytes=0)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(WanshimError, match="is used in process 1"):
        offload.pack(torch.ones(4))


def test_buffers_of_a_gpu_are_page_locked_and_those_of_the_host_are_not() -> None:
    offload = CheckpointOffload()
    assert [offload._pools[device].locked for device in ("cuda", "cpu")] == [True, False]


def test_host_memory_for_gpus_counts_and_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "page_lock", lambda memory: None)
    offload = CheckpointOffload()
    pool = offload._pools["cuda"]
    buffer = pool.take(100)
    offload.clear()
    assert offload.host_bytes == 100  # it is in use
    pool.give(buffer)
    offload.clear()
    assert offload.host_bytes == 0


def test_pool_lends_no_buffer_twice_and_none_that_is_far_too_big() -> None:
    pool = HostPool(locked=False)
    first, second = pool.take(100), pool.take(100)
    assert first is not second
    pool.give(first)
    assert pool.take(60) is first
    pool.give(first)
    assert pool.take(40) is not first
    assert pool.num_bytes == 240


def test_dense_is_told_from_strided() -> None:
    whole = torch.zeros(4, 6, 2)
    assert is_dense(whole)
    assert is_dense(whole.permute(2, 0, 1))
    assert is_dense(whole[1:2])
    assert not is_dense(whole[:, 1:])
    assert not is_dense(torch.zeros(1, 3).expand(4, 3))
