"""Weights of a model's blocks in host memory that processes share, and the model computed from there."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.streaming.model import Model, data
from wanshim.core.generation.host_streams import host_copy, wait_for, weights_on_host
from wanshim.core.shared.host_memory import PAGE, unnamed_file
from wanshim.core.streaming import HostCopy, bytes_when_streamed, compute_from, page_locked, ring
from wanshim.core.streaming import host_copy as host_copy_module
from wanshim.core.streaming.block_weights import bounds_of
from wanshim.core.streaming.host_copy import _file_sizes
from wanshim.core.streaming.page_locked import PageLocked
from wanshim.core.streaming.ring import Ring
from wanshim.errors import HostMemoryInvalid, PlacementInvalid

CPU = torch.device("cpu")
either = pytest.mark.parametrize("shared", [False, True])


def made() -> Model:
    model = Model()
    model.checkpointing = False
    return model.eval()


@torch.no_grad()
def outputs(model: nn.Module) -> list[torch.Tensor]:
    return [model(data(seed)) for seed in range(2)]


@either
def test_a_model_computes_the_same_bits_from_its_copy_and_is_as_before_afterwards(shared: bool) -> None:
    model = made()
    expected, identities = outputs(model), [id(p) for p in model.parameters()]
    copy = HostCopy.of(model, shared=shared)
    copy.wait()
    places = [p.data_ptr() for p in model.parameters()]
    attached = compute_from(copy, model, CPU)
    assert all(map(torch.equal, outputs(model), expected))
    attached.remove()
    assert [p.data_ptr() for p in model.parameters()] == places
    assert [id(p) for p in model.parameters()] == identities
    assert not any(block._forward_pre_hooks for block in model.blocks)
    assert all(map(torch.equal, outputs(model), expected))


def test_another_mapping_of_the_file_sees_the_same_weights() -> None:
    model, there = made(), made()
    expected = outputs(model)
    copy = HostCopy.of(model, shared=True)
    copy.wait()
    other = HostCopy.in_files(map(os.dup, copy.descriptors), copy.bounds)
    for own, weight in zip(model.parameters(), there.parameters(), strict=True):
        offset = copy.offset(own)
        weight.data = torch.zeros_like(own) if offset is None else other.view(own, offset)
        weight.data = own.detach().clone() if offset is None else weight.data
    attached = compute_from(other, there, CPU)
    assert all(map(torch.equal, outputs(there), expected))
    attached.remove()
    with torch.no_grad():
        model.blocks[0].base.weight.mul_(2)
    assert torch.equal(there.blocks[0].base.weight, model.blocks[0].base.weight)


@either
def test_weights_added_later_stay_on_the_device_and_replaced_ones_are_seen(shared: bool) -> None:
    model = made()
    copy = HostCopy.of(model, shared=shared)
    copy.wait()
    model.blocks[0].register_parameter("added", nn.Parameter(torch.ones(2)))
    found = copy.layouts(model)
    assert found is not None
    assert all(weight.tensor is not model.blocks[0].added for layout in found for weight in layout.weights)
    for weight in model.blocks.parameters():
        weight.data = weight.data.clone()
    assert copy.layouts(model) is None
    with pytest.raises(PlacementInvalid, match="elsewhere"):
        compute_from(copy, model, CPU)


@either
def test_weights_that_have_gone_leave_the_others(shared: bool) -> None:
    model = made()
    model.blocks[0].register_parameter("adapter", nn.Parameter(torch.ones(2)))
    copy = HostCopy.of(model, shared=shared)
    copy.wait()
    del model.blocks[0].adapter
    expected = outputs(model)
    attached = compute_from(copy, model, CPU)
    assert all(map(torch.equal, outputs(model), expected))
    attached.remove()


@either
def test_a_file_of_one_weight_has_no_other(shared: bool, tmp_path: Path) -> None:
    model = made()
    HostCopy.of(model, shared=shared).wait()
    weight = model.blocks[0].base.weight
    torch.save(weight.detach(), tmp_path / "weight.pt")
    assert (tmp_path / "weight.pt").stat().st_size < weight.nbytes + 4096


def test_a_forked_process_has_no_memory_of_one_process() -> None:
    """It would copy every page that is locked."""
    model = made()
    copy = HostCopy.of(model, shared=False)
    address = copy.memory.data_ptr()

    def lines() -> bool:
        bounds = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in bounds)

    assert lines()
    child = os.fork()
    if not child:
        os._exit(lines())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not copy.descriptors


class Waiting:
    """In place of the events of CUDA, which the CPU has not: each forward waited so long for weights."""

    def __init__(self, share: float, room: int) -> None:
        self.share, self.room = share, room
        self.asked: list[tuple[int, int]] = []
        self.has_kept = False

    def begin_forward(self) -> float:
        return self.share

    def may_keep(self, size: int, most: int) -> int:
        self.asked.append((size, most))
        return min(self.room, most)

    def on_kept(self) -> None:
        self.has_kept = True


def compute_waiting(model: Model, waits: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Ring, Any]:
    rings: list[Ring] = []
    monkeypatch.setattr(host_copy_module, "Ring", lambda *given: rings.append(Ring(*given)) or rings[0])
    copy = HostCopy.of(model, shared=False)
    copy.wait()
    attached = compute_from(copy, model, CPU, waits)
    return rings[0], attached


@pytest.mark.parametrize(("share", "room", "loads"), [(0.5, 9, 0), (0.5, 3, 5), (0.5, 0, 8), (0.05, 9, 8)])
def test_as_many_blocks_stay_as_have_room_if_forwards_wait_for_them(
    share: float, room: int, loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, waits = made(), Waiting(share, room)
    assert len(model.blocks) == 8
    expected = outputs(model)
    found, attached = compute_waiting(model, waits, monkeypatch)
    assert all(map(torch.equal, outputs(model), expected))
    before = found.count.loads
    assert all(map(torch.equal, outputs(model), expected))
    assert found.count.loads - before == 2 * loads  # two forwards
    assert found.count.late == 1  # the first block; what takes turns comes ahead of use
    assert waits.asked == [(max(layout.num_bytes for layout in found.blocks), 6)] * (share > 0.1)
    assert waits.has_kept is (loads < 8)
    attached.remove()
    assert all(map(torch.equal, outputs(model), expected))
    places = [block.on(found.host.memory) for block in found.blocks]
    assert all(any(_lies_in(p, place) for place in places) for p in model.blocks.parameters())


def _lies_in(weight: torch.Tensor, place: torch.Tensor) -> bool:
    return 0 <= weight.data_ptr() - place.data_ptr() < place.nbytes


@torch.no_grad()
def test_blocks_that_stay_give_the_next_one_their_time_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    found, attached = compute_waiting(model, Waiting(0.5, 3), monkeypatch)
    model(data(0))
    turns = [index for index in range(8) if index not in found._own]
    for index, following in zip(turns, [*turns[1:], turns[0]], strict=True):
        found.acquire(index)
        assert found._holding(following) is not None
    attached.remove()


def test_as_many_blocks_stay_as_the_device_then_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, waits = made(), Waiting(0.5, 9)
    expected, empty, left = outputs(model), torch.empty, [2]
    found, attached = compute_waiting(model, waits, monkeypatch)

    def limited(*given: Any, **how: Any) -> torch.Tensor:
        if how.get("dtype") is torch.uint8:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("none left")
        return empty(*given, **how)

    monkeypatch.setattr(torch, "empty", limited)
    assert all(map(torch.equal, [*outputs(model), *outputs(model)], [*expected, *expected]))
    assert len(found._own) == 2
    assert waits.has_kept
    attached.remove()


def test_what_stays_of_a_call_in_inference_mode_serves_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    expected = outputs(model)
    found, attached = compute_waiting(model, Waiting(0.5, 9), monkeypatch)
    with torch.inference_mode():
        outputs(model)
    found.release()  # slots are filled anew
    assert all(map(torch.equal, outputs(model), expected))
    attached.remove()


class Clock:
    """In place of CUDA's streams and events: events are done up to `done`, and end at the time of their record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.done = 0.0, True
        clock = self

        class Event:
            def record(self, stream: object) -> None:
                self.at = clock.now

            def query(self) -> bool:
                return clock.done

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Stream:
            def wait_event(self, ready: float) -> None:
                clock.now = max(clock.now, ready)

        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())

    def forward(self, waits: ring.Waits, waiting: float, computing: float) -> float:
        share = waits.begin_forward()
        for _ in range(2):
            waits.wait(self.now + waiting / 2)  # type: ignore[arg-type]
            self.now += computing / 2
        return share


def test_share_of_waiting_is_that_of_the_forward_that_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = Clock(monkeypatch), ring.Waits(CPU, lambda *_: 0, lambda: None)
    assert clock.forward(waits, 90, 10) == 0  # the first, whose weights nobody has asked for ahead
    assert clock.forward(waits, 1, 3) == 0
    clock.done = False
    assert clock.forward(waits, 90, 10) == 0  # the device has not computed the second yet
    clock.done = True
    assert clock.forward(waits, 30, 10) == 0.25
    assert clock.forward(waits, 0, 10) == 0.75
    waits.begin_anew()
    assert clock.forward(waits, 90, 10) == clock.forward(waits, 0, 10) == 0
    assert clock.forward(waits, 0, 10) == 0


def test_a_forward_is_not_timed_before_all_pages_are_locked() -> None:
    """Any forward would wait meanwhile."""
    copy = HostCopy.of(made(), shared=False)
    copy.wait()
    assert copy.is_settled
    go_on = threading.Event()
    copy._locking = threading.Thread(target=go_on.wait, args=(60,))
    copy._locking.start()
    assert not copy.is_settled
    go_on.set()
    copy._locking.join()
    assert copy.is_settled


def slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[Any]]:
    """Lets no block but the first come to its copy until the event is set; and the blocks that have begun to come."""
    go_on, begun, put = threading.Event(), list[Any](), HostCopy._put

    def late(copy: HostCopy, block: Any) -> None:
        begun.append(begin := copy.offset(block[0]))
        assert not begin or go_on.wait(60)
        put(copy, block)

    monkeypatch.setattr(HostCopy, "_put", late)
    return go_on, begun


@either
def test_a_model_computes_while_its_weights_are_on_their_way(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    expected, old = outputs(model), [p.data_ptr() for p in model.parameters()]
    go_on, begun = slowly(monkeypatch)
    copy = HostCopy.of(model, shared=shared)
    attached = compute_from(copy, model, CPU)
    copy.wait(0)
    reached: list[int] = []
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: reached.append(number))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(outputs, model)
        with pytest.raises(TimeoutError):
            found.result(0.3)
        assert reached == [0]  # computed, although the next one has not come
        go_on.set()
        assert all(map(torch.equal, found.result(60), expected))
    attached.remove()
    assert len(begun) == len(model.blocks)
    assert all(map(torch.equal, outputs(model), expected))
    assert all(copy.offset(p) is not None for p in model.blocks.parameters())
    assert not {p.data_ptr() for p in model.blocks.parameters()} & set(old)


@either
def test_what_ends_before_all_have_come_waits_for_them(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    expected = outputs(model)
    go_on, _ = slowly(monkeypatch)
    copy = HostCopy.of(model, shared=shared)
    attached = compute_from(copy, model, CPU)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(attached.remove)
        with pytest.raises(TimeoutError):
            ended.result(0.3)
        go_on.set()
        ended.result(60)
    assert all(copy.offset(p) is not None for p in model.blocks.parameters())
    assert all(map(torch.equal, outputs(model), expected))


def without_the_last_block(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the last block fail to come to a copy."""
    put, last = HostCopy._put, model.blocks[-1]

    def fails(copy: HostCopy, block: Any) -> None:
        if any(weight is own for weight in block for own in last.parameters()):
            raise RuntimeError("not that one")
        put(copy, block)

    monkeypatch.setattr(HostCopy, "_put", fails)


@either
def test_a_block_that_could_not_come_is_said_where_it_is_needed(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    expected = outputs(model)
    without_the_last_block(model, monkeypatch)
    copy = HostCopy.of(model, shared=shared)
    attached = compute_from(copy, model, CPU)
    with torch.no_grad(), pytest.raises(RuntimeError, match="not that one"):
        model(data(0))
    attached.remove()
    assert not copy.settle()
    assert all(map(torch.equal, outputs(model), expected)), "its weights are where they were"


def test_a_copy_of_one_process_becomes_one_that_others_map() -> None:
    model = made()
    expected = outputs(model)
    own = host_copy(model, shared=False)
    assert host_copy(model, shared=False) is own
    shared = host_copy(model, shared=True)
    shared.wait()
    assert shared.descriptors
    assert host_copy(model, shared=False) is shared
    del own
    assert all(map(torch.equal, outputs(model), expected))


@either
def test_a_host_without_room_is_said_and_the_model_stays(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    expected, places = outputs(model), [p.data_ptr() for p in model.parameters()]
    monkeypatch.setattr("wanshim.core.shared.host_memory.available_bytes", lambda: 1)
    with pytest.raises(HostMemoryInvalid, match="GiB of host memory"):
        HostCopy.of(model, shared=shared)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(map(torch.equal, outputs(model), expected))


@pytest.mark.parametrize(("blocks_of_room", "at_once"), [(0, 2), (8 * 3, 3), (8 * 100, 8)])
def test_as_many_blocks_are_moved_at_once_as_an_eighth_of_the_free_memory_holds(
    monkeypatch: pytest.MonkeyPatch, blocks_of_room: int, at_once: int
) -> None:
    pools = []

    def pool(count: int, *names: str) -> ThreadPoolExecutor:
        pools.append(count)
        return ThreadPoolExecutor(count, *names)

    model = Model().requires_grad_(False)
    largest = max(end - begin for begin, end in HostCopy.of(model, shared=False).bounds)
    monkeypatch.setattr(host_copy_module, "THREADS", 8)
    monkeypatch.setattr(host_copy_module, "available_bytes", lambda: blocks_of_room * largest)
    monkeypatch.setattr(host_copy_module, "ThreadPoolExecutor", pool)
    HostCopy.of(Model().requires_grad_(False), shared=False).wait()
    assert pools == [at_once]


def test_files_that_the_host_has_no_room_for_are_said_and_the_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit is met when pages are fetched."""
    model = made()
    expected, places = outputs(model), [p.data_ptr() for p in model.parameters()]

    def full(memory: torch.Tensor) -> bool:
        if memory.numel() == PAGE:  # the states of the blocks
            return True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("wanshim.core.streaming.host_copy.populate", full)
    copy = HostCopy.of(model, shared=True)
    with pytest.raises(
        HostMemoryInvalid, match=r"^[\d.]+ GiB of host memory for the weights of Model: .*No space left"
    ):
        copy.wait()
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(map(torch.equal, outputs(model), expected))


def test_pages_are_locked_in_every_process_when_their_block_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker maps the files while weights come into them: the host has no room for all pages before. A double of
    the lock, for which there is no GPU; the other mapping is of this process."""
    model, put, may_come = made(), HostCopy._put, threading.Event()
    settled: dict[int, list[bool]] = {}
    last = next(reversed(list(model.blocks[-1].parameters())))

    def lock(memory: torch.Tensor, parts: list[int], device: Any, wait: Any) -> None:
        for part in range(len(parts) + 1):
            is_there = wait(part)
            settled.setdefault(memory.data_ptr(), []).append(is_there)

    def comes(copy: HostCopy, block: Any) -> None:
        may_come.wait(60)
        if any(weight is last for weight in block):
            raise RuntimeError("not that one")
        put(copy, block)

    monkeypatch.setattr(HostCopy, "_put", comes)
    monkeypatch.setattr("wanshim.core.streaming.host_copy.page_lock", lock)
    copy = HostCopy.of(model, shared=True)
    other = HostCopy.in_files(map(os.dup, copy.descriptors), copy.bounds)
    for each in (copy, other):
        each.lock(torch.device("cuda"))
    time.sleep(0.1)
    assert settled == {}
    may_come.set()
    for each in (copy, other):
        assert each._locking is not None
        each._locking.join(60)
    expected = [True] * (len(model.blocks) - 1) + [False]
    assert settled == {each.memory.data_ptr(): expected for each in (copy, other)}


def placed(model: Model, copy: HostCopy, like: HostCopy, weights: Iterator[torch.Tensor]) -> None:
    """As a worker does, before the weights have come."""
    for own, weight in zip(model.blocks.parameters(), weights, strict=True):
        offset = like.offset(weight)
        assert offset is not None
        own.data = copy.view(weight, offset)


def test_worker_computes_while_weights_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another mapping of the files, in this process."""
    model, there = made(), made()
    expected = outputs(model)
    go_on, _ = slowly(monkeypatch)
    copy = HostCopy.of(model, shared=True)
    other = HostCopy.in_files(map(os.dup, copy.descriptors), copy.bounds)
    placed(there, other, copy, model.blocks.parameters())
    attached = compute_from(other, there, CPU)
    copy.wait(0)
    assert [other.has(number) for number in range(len(model.blocks))] == [True] + [False] * (len(model.blocks) - 1)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(outputs, there)
        with pytest.raises(TimeoutError):
            found.result(0.3)
        go_on.set()
        assert all(map(torch.equal, found.result(60), expected))
    attached.remove()


def test_worker_does_not_compute_with_weights_that_failed_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    model, there = made(), made()
    without_the_last_block(model, monkeypatch)
    copy = HostCopy.of(model, shared=True)
    other = HostCopy.in_files(map(os.dup, copy.descriptors), copy.bounds)
    placed(there, other, copy, model.blocks.parameters())
    attached = compute_from(other, there, CPU)
    with torch.no_grad(), pytest.raises(HostMemoryInvalid, match="did not come"):
        there(data(0))
    attached.remove()


def test_weight_whose_sign_torch_keeps_apart_comes_as_its_values() -> None:
    model = made()
    expected = outputs(model)
    for block in model.blocks:
        block.base.weight.data = torch._neg_view(-block.base.weight.data)
    HostCopy.of(model, shared=False).wait()
    assert not any(weight.is_neg() for weight in model.blocks.parameters())
    assert all(map(torch.equal, outputs(model), expected))


def test_weight_that_did_not_come_by_itself_is_written_and_one_on_its_way_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight on a device does not come; here the first block's."""
    model, put, go_on = made(), HostCopy._put, threading.Event()
    first = list(model.blocks[0].parameters())

    def late(copy: HostCopy, block: Any) -> None:
        if not any(weight is own for weight in block for own in first):
            go_on.wait(60)
            put(copy, block)

    monkeypatch.setattr(HostCopy, "_put", late)
    copy = HostCopy.of(model, shared=True)
    copy.wait(0)
    offsets = [copy.offset(weight) for weight in first]
    for weight in model.blocks.parameters():
        copy.write(weight)
    assert not copy.has(1), "it has not been waited for"
    for weight, offset in zip(first, offsets, strict=True):
        assert offset is not None
        assert torch.equal(copy.view(weight, offset), weight)
    go_on.set()
    copy.wait()


@either
def test_copy_in_place_of_one_that_failed_has_all_weights(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its other blocks have come by then: two that move at once would take them from each other."""
    model, put = made(), HostCopy._put
    expected, first = outputs(model), model.blocks[0].base.weight

    def fails_first(copy: HostCopy, block: Any) -> None:
        if any(weight is first for weight in block):
            raise RuntimeError("not that one")
        time.sleep(0.05)
        put(copy, block)

    with monkeypatch.context() as failing:
        failing.setattr(HostCopy, "_put", fails_first)
        failed = host_copy(model, shared=shared)
        with pytest.raises(RuntimeError, match="not that one"):
            wait_for(model, failed)
    copy = host_copy(model, shared=False)
    wait_for(model, copy)
    assert copy is not failed
    assert all(copy.offset(weight) is not None for weight in model.blocks.parameters())
    assert all(map(torch.equal, outputs(model), expected))


def test_copy_that_processes_share_is_made_in_inference_mode() -> None:
    """As a user has it around a call."""
    with torch.inference_mode():
        model = made()
        copy = HostCopy.of(model, shared=True)
    copy.wait()
    assert copy.settle()
    assert all(copy.offset(weight) is not None for weight in model.blocks.parameters())


@pytest.mark.parametrize("blocks", [2, 40, 64, 65])
def test_memory_of_several_files_is_one(blocks: int) -> None:
    bounds = bounds_of(range(5000, 5000 + blocks))
    copy = HostCopy.in_files(map(unnamed_file, _file_sizes(bounds)), bounds)
    assert 2 <= len(copy.descriptors) <= 64
    assert copy.memory.numel() == bounds[-1][1]
    other = HostCopy.in_files(map(os.dup, copy.descriptors), bounds)
    expected = torch.arange(copy.memory.numel()).to(torch.uint8)
    copy.memory.copy_(expected)
    assert torch.equal(other.memory, expected)
    files, address = list(copy.descriptors), copy.memory.data_ptr()
    del copy, other
    assert not any(f"{address:x}-" in line for line in Path("/proc/self/maps").read_text().splitlines())
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_bytes_are_those_of_two_blocks_and_the_rest() -> None:
    model = made()
    whole = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    found = bytes_when_streamed(model)
    assert found is not None
    assert 0 < found < whole
    assert bytes_when_streamed(nn.Sequential(nn.Linear(2, 2))) is None


@either
def test_page_locked_memory_that_weights_leave_is_returned(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here to lock pages for: weights are said to be. Who waits for a block does not wait for that."""
    released, may_release = threading.Event(), threading.Event()
    monkeypatch.setattr(host_copy_module, "is_page_locked", lambda tensor: True)

    def release() -> None:
        may_release.wait(10)
        released.set()

    monkeypatch.setattr(host_copy_module, "release_pinned", release)
    copy = HostCopy.of(made(), shared=shared)
    copy.wait()
    assert not released.is_set()
    may_release.set()
    assert released.wait(10)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ids of tensors that are said to be page-locked: no GPU is here to lock pages for."""
    found: set[int] = set()
    monkeypatch.setattr(page_locked, "is_page_locked", lambda tensor: id(tensor) in found)
    return found


def test_page_locked_weights_are_streamed_from_where_they_are(locked: set[int]) -> None:
    model = made()
    expected, places = outputs(model), [p.data_ptr() for p in model.parameters()]
    locked |= set(map(id, model.parameters()))
    found = weights_on_host(model, shared=False, moved=_not_called)
    assert isinstance(found, PageLocked)
    attached = compute_from(found, model, CPU)
    assert all(map(torch.equal, outputs(model), expected))
    attached.remove()
    assert [p.data_ptr() for p in model.parameters()] == places
    with torch.no_grad():
        model.blocks[0].base.weight.add_(1)
    changed = outputs(model)
    attached = compute_from(found, model, CPU)
    assert all(map(torch.equal, outputs(model), changed))
    assert not any(map(torch.equal, changed, expected))
    attached.remove()


def test_weights_come_to_a_copy_where_not_all_are_page_locked_or_others_need_them(locked: set[int]) -> None:
    model = made()
    locked |= set(map(id, model.parameters()))
    copy = weights_on_host(model, shared=True, moved=lambda weights: None)
    assert isinstance(copy, HostCopy)
    assert weights_on_host(model, shared=False, moved=_not_called) is copy
    partly = made()
    locked |= set(map(id, partly.blocks[0].parameters()))
    assert isinstance(weights_on_host(partly, shared=False, moved=lambda weights: None), HostCopy)


def _not_called(weights: Sequence[torch.Tensor]) -> None:
    raise AssertionError("no weight has moved")
