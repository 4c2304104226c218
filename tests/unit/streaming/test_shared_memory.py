"""One copy of the waiting weights for the ranks of a host, which are threads of this process."""

from __future__ import annotations

import errno
import gc
import os
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.threads import at_once
from wanshim.core.shared.processes import machine
from wanshim.core.streaming import LocalRanks, allocate, shared_memory
from wanshim.core.streaming.shared_memory import COMPARED, WRITTEN, Shared
from wanshim.errors import HostMemoryInvalid, WanshimError

GIB = 2**30
Call = Callable[[LocalRanks], Any]


@pytest.fixture(autouse=True)
def _first_allocation_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class First:  # counts the allocations of a process, and these ranks have one process
        def __iadd__(self, one: int) -> First:
            return self

        def __str__(self) -> str:
            return "1"

    monkeypatch.setattr(shared_memory, "_shares", First())


def as_ranks(*calls: Call, timeout_s: float = 20.0) -> list[Any]:
    """What each rank's call returned or raised."""
    store = dist.HashStore()
    hosts = [LocalRanks(rank, len(calls), store, "here/boot 7", timeout_s=timeout_s) for rank in range(len(calls))]
    return at_once(*map(partial, calls, hosts))


def take(num_bytes: int, folder: Path) -> Call:
    return lambda host: allocate(num_bytes, host, folder)


def test_ranks_of_a_host_see_one_memory_whose_file_has_no_name_any_more(tmp_path: Path) -> None:
    ranks = as_ranks(*[take(4096, tmp_path)] * 3)
    assert [rank.leads for rank in ranks] == [True, False, False]
    assert not ranks[2].memory.any()
    ranks[0].memory[7] = 5
    assert [rank.memory[7].item() for rank in ranks] == [5, 5, 5]
    assert [rank.memory.numel() for rank in ranks] == [4096] * 3
    assert list(tmp_path.iterdir()) == []


def test_file_of_the_memory_is_of_this_user_alone(tmp_path: Path) -> None:
    path, memory = shared_memory._create(2**20, tmp_path)
    assert memory.numel() == path.stat().st_size == 2**20
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_files_of_one_process_have_names_that_differ(tmp_path: Path) -> None:
    paths = {shared_memory._create(4096, tmp_path)[0] for _ in range(2)}
    assert len(paths) == len(list(tmp_path.iterdir())) == 2


def test_rank_that_comes_after_the_others_deadline_raises_at_once() -> None:
    store, memory = dist.HashStore(), torch.empty(1, dtype=torch.uint8)
    first, late = (
        Shared(memory, LocalRanks(rank, 2, store, "here/boot 7", timeout_s=timeout_s), "key")
        for rank, timeout_s in ((0, 0.1), (1, 60.0))
    )
    with pytest.raises(WanshimError, match=r"local ranks \[1\] of here did not come"):
        first.meet(WRITTEN)
    started = time.monotonic()
    with pytest.raises(WanshimError, match=r"local ranks \[1\] of here did not come"):
        late.meet(WRITTEN)
    assert time.monotonic() - started < 30


def test_file_has_no_holes_on_a_system_that_cannot_populate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "populate", lambda memory: False)
    path, _ = shared_memory._create(2**20, tmp_path)
    assert path.stat().st_blocks * 512 >= 2**20


def test_rank_alone_on_its_host_has_memory_of_its_own_and_waits_for_nobody() -> None:
    shared = allocate(4096, LocalRanks())
    assert shared.leads
    assert shared.memory.numel() == 4096
    shared.meet(WRITTEN)
    shared.abandon(ValueError("nobody listens"))


def fail_to_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(memory: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory, "mapped", lambda descriptor, num_bytes: None)
    monkeypatch.setattr(shared_memory, "populate", fail)


def test_memory_that_a_rank_alone_cannot_have_is_named_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_populate(monkeypatch)
    with pytest.raises(HostMemoryInvalid, match=r"3\.00 GiB of host memory: .*No space left.*free -g"):
        allocate(3 * GIB, LocalRanks())


def test_memory_that_the_host_lacks_is_named_in_gib_with_what_is_free_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_populate(monkeypatch)
    free = os.statvfs_result((4096, 4096, 0, 0, 2 * GIB // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder: free)
    first, second = as_ranks(*[take(3 * GIB, tmp_path)] * 2)
    assert "3.00 GiB of shared memory in" in str(first)
    assert "2.00 GiB are free" in str(first)
    assert "--shm-size" in str(first)
    assert isinstance(second, WanshimError)
    assert "local rank 0 of here could not make the shared memory" in str(second)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_ask_for_different_sizes_stop_and_leave_no_file(tmp_path: Path) -> None:
    first, second = as_ranks(take(4096, tmp_path), take(8192, tmp_path))
    assert f"has 4096 bytes and belongs to user {os.getuid()}" in str(second)
    assert f"Expected 8192 bytes of user {os.getuid()}" in str(second)
    assert "local rank 1 of here failed: WanshimError" in str(first)
    assert list(tmp_path.iterdir()) == []


def test_file_of_another_user_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = shared_memory._create(4096, tmp_path)
    monkeypatch.setattr(shared_memory.os, "getuid", lambda: 12345)
    with pytest.raises(WanshimError, match="belongs to user"):
        shared_memory._map(path, 4096)


def test_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    path, _ = shared_memory._create(4096, tmp_path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        shared_memory._map(tmp_path / "link", 4096)


def test_rank_that_leads_and_never_comes_is_named_at_the_deadline(tmp_path: Path) -> None:
    _, second = as_ranks(lambda host: None, take(4096, tmp_path), timeout_s=0.05)
    assert "local rank 0 of here offered no shared memory in 0 s" in str(second)


def test_ranks_that_never_come_are_named_at_the_deadline_and_the_file_goes(tmp_path: Path) -> None:
    first, *_ = as_ranks(take(4096, tmp_path), lambda host: None, lambda host: None, timeout_s=0.05)
    assert "local ranks [1, 2] of here did not come to wanshim/streaming/here/boot 7/1/mapped in 0 s" in str(first)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", [WRITTEN, COMPARED])
def test_rank_that_abandons_stops_those_who_wait_for_it_at_either_meeting(what: str, tmp_path: Path) -> None:
    def meet(host: LocalRanks) -> Shared:
        shared = allocate(4096, host, tmp_path)
        shared.meet(what)
        return shared

    def abandon(host: LocalRanks) -> None:
        allocate(4096, host, tmp_path).abandon(MemoryError("no page"))

    first, second = as_ranks(meet, abandon)
    assert "local rank 1 of here failed: MemoryError: no page" in str(first)
    assert second is None


def test_ranks_that_all_come_go_on_from_each_meeting(tmp_path: Path) -> None:
    def meet(host: LocalRanks) -> Shared:
        shared = allocate(4096, host, tmp_path)
        shared.meet(WRITTEN)
        shared.meet(COMPARED)
        return shared

    assert [type(end) for end in as_ranks(meet, meet)] == [Shared, Shared]


def test_process_group_of_one_rank_a_host_shares_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LocalRanks.of_process_group(1, 2) == LocalRanks()  # there is no process group
    store = dist.HashStore()
    monkeypatch.setattr(shared_memory, "default_store", lambda: store)
    assert LocalRanks.of_process_group(0, 1) == LocalRanks()
    assert LocalRanks.of_process_group(1, 2) == LocalRanks(1, 2, store, machine(), timeout_s=300.0)


def test_forked_child_does_not_come_to_a_meeting_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared(torch.empty(0), LocalRanks(1, 2, dist.HashStore(), "here/boot 7", timeout_s=0.1), "key")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(WanshimError, match="is used in process 1"):
        shared.meet(WRITTEN)


def test_file_that_has_the_name_already_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.secrets, "token_hex", lambda size: "guessed")
    shared_memory._create(4096, tmp_path)
    with pytest.raises(FileExistsError):
        shared_memory._create(4096, tmp_path)


def test_each_rank_fetches_its_pages_and_keeps_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    monkeypatch.setattr(shared_memory, "populate", lambda memory: fetched.append(memory.numel()) or True)
    gc.collect()  # or what other tests left closes descriptors meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    path = shared_memory._create(4096, tmp_path)[0]
    shared_memory._map(path, 4096)
    with pytest.raises(WanshimError, match="4096 bytes and belongs"):
        shared_memory._map(path, 8192)
    assert fetched == [4096, 4096]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
