"""One copy of the waiting weights for the ranks of a host, which are threads of this process."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.threads import at_once
from wanshim.core.ranks.group import Group
from wanshim.core.shared import host_memory
from wanshim.core.streaming import shared_memory
from wanshim.core.streaming.shared_memory import Shared, allocate
from wanshim.errors import HostMemoryInvalid, RankAbsent, RanksFailed, WanshimError

GIB = 2**30
CALL = "stream_model"
Call = Callable[[Group], Any]


def as_ranks(*calls: Call) -> list[Any]:
    """What each rank's call returned or raised. The ranks are 4, 5, ... of their job."""
    store, ranks = dist.HashStore(), range(4, 4 + len(calls))
    return at_once(*(partial(call, Group(ranks, place, store)) for place, call in enumerate(calls)))


def take(num_bytes: int, **options: bool) -> Call:
    return lambda host: allocate(num_bytes, host, CALL, **options)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "WAIT_S", 0.05)


def test_ranks_of_a_host_see_one_memory() -> None:
    ranks = as_ranks(*[take(4096)] * 3)
    assert [rank.leads for rank in ranks] == [True, False, False]
    assert not ranks[2].memory.any()
    ranks[0].memory[7] = 5
    assert [rank.memory[7].item() for rank in ranks] == [5, 5, 5]
    assert [rank.memory.numel() for rank in ranks] == [4096] * 3


def test_what_a_rank_writes_to_private_memory_no_other_sees() -> None:
    first, second = as_ranks(*[take(4096, private=True)] * 2)
    first.writable[7] = 5
    assert second.memory[7] == first.memory[7] == 5
    first.memory[8], second.memory[9] = 1, 1
    assert (second.memory[8], first.memory[9]) == (0, 0)
    assert not first.writable[8:10].any()


def test_memory_has_no_name_and_ends_with_its_last_mapping() -> None:
    def files() -> int:
        return sum("wanshim-weights" in line for line in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()
    before, names = files(), set(Path("/dev/shm").iterdir())
    ranks = as_ranks(*[take(4096)] * 2)
    assert set(Path("/dev/shm").iterdir()) == names
    assert files() == before + 2
    ranks.clear()
    gc.collect()
    assert files() == before


def test_limit_on_shared_memory_of_a_container_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", None)  # nobody asks for the room in a folder
    assert all(isinstance(rank, Shared) for rank in as_ranks(*[take(2**27)] * 2))


def test_rank_that_comes_after_the_others_deadline_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, memory = dist.HashStore(), torch.empty(1, dtype=torch.uint8)
    first, late = (Shared(memory, None, Group(range(2), rank, store), "topic", CALL) for rank in range(2))
    monkeypatch.setattr(shared_memory, "WAIT_S", 0.1)
    with pytest.raises(RankAbsent, match="rank 1 did not call stream_model"):
        first.meet()
    monkeypatch.setattr(shared_memory, "WAIT_S", 60.0)
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 failed: RankAbsent: rank 1 did not call stream_model"):
        late.meet()
    assert time.monotonic() - started < 30


def test_ranks_that_cannot_meet_have_memory_of_their_own_and_wait_for_nobody() -> None:
    for host in (Group(), Group(range(2), 1)):
        shared = allocate(4096, host, CALL)
        assert shared.leads
        assert shared.memory.numel() == 4096
        shared.meet()
        shared.abandon(ValueError("nobody listens"))


def fail_to_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(memory: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory, "unnamed_file", lambda num_bytes: os.open("/dev/null", os.O_RDWR))
    monkeypatch.setattr(shared_memory, "mapped", lambda descriptor, num_bytes: None)
    monkeypatch.setattr(shared_memory, "populate", fail)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 5 * GIB)


def test_memory_that_a_rank_alone_cannot_have_is_named_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_populate(monkeypatch)
    with pytest.raises(HostMemoryInvalid, match=r"3\.00 GiB of host memory for .*No space left.*free -g"):
        allocate(3 * GIB, Group(), CALL)


def test_memory_that_the_host_lacks_is_named_on_each_rank_with_what_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_to_populate(monkeypatch)
    first, second = as_ranks(*[take(3 * GIB)] * 2)
    assert isinstance(first, HostMemoryInvalid)
    assert "3.00 GiB of host memory for weights" in str(first)
    assert "5.00 GiB are available" in str(first)
    assert isinstance(second, RanksFailed)
    assert "stream_model failed on rank 4: HostMemoryInvalid: 3.00 GiB of host memory" in str(second)


def test_memory_is_not_asked_of_a_host_that_has_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "mapped", None)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2 * GIB)
    first, second = as_ranks(*[take(3 * GIB)] * 2)
    assert "2.00 GiB are available" in str(first)
    assert isinstance(second, RanksFailed)


def test_ranks_that_ask_for_different_sizes_stop() -> None:
    for error in as_ranks(take(4096), take(8192)):
        assert "the ranks of this host share 4096 and 8192 bytes" in str(error)
        assert "the ranks load different models" in str(error)


def offer(file: int, **other: int) -> dict[str, int]:
    found = os.fstat(file)
    return {"process": os.getpid(), "file": file, "inode": found.st_ino, "bytes": found.st_size} | other


@pytest.fixture
def file() -> Any:
    found = host_memory.unnamed_file(4096)
    yield found
    os.close(found)


def test_memory_of_another_user_is_not_opened(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(shared_memory._opened(offer(file)))
    monkeypatch.setattr(shared_memory.os, "getuid", lambda: 12345)
    with pytest.raises(WanshimError, match="not the memory of the first rank"):
        shared_memory._opened(offer(file))


@pytest.mark.parametrize("other", [{"inode": 1}, {"bytes": 8192}])
def test_another_file_than_the_one_that_is_offered_is_not_opened(file: int, other: dict[str, int]) -> None:
    """As in another process namespace, where another process has the number."""
    with pytest.raises(WanshimError, match=r"not the memory of the first rank.*one process namespace"):
        shared_memory._opened(offer(file, **other))


def test_file_with_a_name_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"0" * 4096)
    with (tmp_path / "secret").open("r+b") as secret, pytest.raises(WanshimError, match="secret of 4096 bytes"):
        shared_memory._opened(offer(secret.fileno()))


def test_rank_that_cannot_open_the_memory_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.os, "getpid", lambda: 2**22 + 1)  # no process has such a number
    first, second = as_ranks(*[take(4096)] * 2)
    assert "rank 5 failed: WanshimError: memory of the first rank of this host cannot be opened" in str(first)
    assert "one process namespace" in str(second)


@pytest.mark.usefixtures("soon")
def test_ranks_that_never_come_are_named_at_the_deadline() -> None:
    _, second = as_ranks(lambda host: None, take(4096))
    assert isinstance(second, RankAbsent)
    assert "rank 4 did not call stream_model within 0.05 s" in str(second)
    first, *_ = as_ranks(take(4096), lambda host: None, lambda host: None)
    assert "ranks 5, 6 did not call stream_model within 0.05 s" in str(first)


@pytest.mark.parametrize("meetings", [0, 1])
def test_rank_that_abandons_stops_those_who_wait_for_it_at_either_meeting(meetings: int) -> None:
    def come(host: Group, times: int) -> Shared:
        shared = allocate(4096, host, CALL)
        for _ in range(times):
            shared.meet()
        return shared

    def abandon(host: Group) -> None:
        come(host, meetings).abandon(MemoryError("no page"))

    first, second = as_ranks(lambda host: come(host, meetings + 1), abandon)
    assert isinstance(first, RanksFailed)
    assert "rank 5 failed: MemoryError: no page" in str(first)
    assert second is None


def test_memory_after_one_that_a_rank_abandoned_is_shared_as_any() -> None:
    def twice(host: Group) -> Shared:
        allocate(4096, host, CALL).abandon(MemoryError("no page"))
        again = allocate(4096, host, CALL)
        again.meet()
        return again

    assert [type(end) for end in as_ranks(twice, twice)] == [Shared, Shared]


def test_ranks_that_all_come_go_on_from_each_meeting() -> None:
    def meet(host: Group) -> Shared:
        shared = allocate(4096, host, CALL)
        shared.meet()
        shared.meet()
        return shared

    assert [type(end) for end in as_ranks(meet, meet)] == [Shared, Shared]


def test_each_rank_fetches_its_pages_and_keeps_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    monkeypatch.setattr(shared_memory, "populate", lambda memory: fetched.append(memory.numel()) or True)
    gc.collect()  # or what other tests left closes descriptors meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    as_ranks(*[take(4096)] * 2)
    as_ranks(take(4096), take(8192))
    gc.collect()
    assert fetched == [4096] * 3
    assert len(list(Path("/proc/self/fd").iterdir())) == before
