"""Pages that are fetched and locked, without a GPU: what the system and CUDA are asked for."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch

from wanshim.core.shared import host_memory
from wanshim.core.shared.host_memory import HostPool, available_bytes, own_bytes, page_lock, pinned, populate

GPU = torch.device("cuda", 1)


class Cuda:
    """`torch.cuda.cudart()` for memory that begins at `base`. `refused` begins no part that can be locked."""

    def __init__(self, base: int, refused: int | None = None) -> None:
        self.base, self.refused = base, refused
        self.locked: dict[int, tuple[int, int]] = {}
        self.devices: set[torch.device] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if address - self.base == self.refused:
            return 2
        self.locked[address - self.base] = (size, flags)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address - self.base]

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.add(device)
        yield


def cuda_for(memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch, refused: int | None = None) -> Cuda:
    cuda = Cuda(memory.data_ptr(), refused)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    return cuda


def test_pages_are_locked_part_by_part_for_all_devices_and_unlocked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(2500, dtype=torch.int32)
    cuda = cuda_for(memory, monkeypatch)
    unlock = page_lock(memory, [4096, 8192], GPU)
    assert cuda.locked == {0: (4096, 1), 4096: (4096, 1), 8192: (1808, 1)}  # 1: cudaHostRegisterPortable
    assert cuda.devices == {GPU}
    unlock()
    assert cuda.locked == {}


def test_part_that_is_not_there_is_not_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = torch.zeros(12288, dtype=torch.uint8)
    cuda = cuda_for(memory, monkeypatch)
    unlock = page_lock(memory, [4096, 8192], GPU, lambda part: part != 1)
    assert cuda.locked.keys() == {0, 8192}
    assert caplog.messages == []
    unlock()
    assert cuda.locked == {}


def test_pages_are_unlocked_when_their_tensor_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(16)
    cuda = cuda_for(memory, monkeypatch)
    page_lock(memory)
    assert cuda.locked == {0: (64, 1)}
    del memory
    assert cuda.locked == {}


@pytest.mark.parametrize("refused", [0, 4096, 8192])
def test_part_that_cannot_be_locked_stays_as_it_is_which_is_said_once(
    refused: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "_refusals", [])
    memory = torch.zeros(12288, dtype=torch.uint8)
    cuda = cuda_for(memory, monkeypatch, refused)
    unlock = page_lock(memory, [4096, 8192])
    assert cuda.locked.keys() == {0, 4096, 8192} - {refused}
    unlock()
    assert cuda.locked == {}
    page_lock(memory[:4096] if refused == 0 else memory, [] if refused == 0 else [4096, 8192])
    (said,) = caplog.messages
    assert "CUDA error 2 for 0.00 GiB" in said
    assert "ulimit -l" in said


def test_error_of_cuda_for_a_page_that_is_not_locked_is_left_to_a_thread_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA keeps it for that thread, and torch's next kernel in this one would raise it."""
    memory = torch.zeros(16)
    cuda, threads = cuda_for(memory, monkeypatch, 0), []
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *_: threads.append(current_thread()) or 2)
    page_lock(memory)
    assert threads != []
    assert all(thread is not current_thread() and not thread.is_alive() for thread in threads)


def test_small_tensor_is_plain_where_no_page_can_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*sizes: Any, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return empty(*sizes, **given)

    monkeypatch.setattr(torch, "empty", refuse)
    found = pinned(torch.ones(2, 3, dtype=torch.float64))
    assert (found.shape, found.dtype) == ((2, 3), torch.float64)


def test_pool_locks_a_buffer_once_and_forgets_those_it_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    monkeypatch.setattr(host_memory, "page_lock", lambda memory: locked.append(memory.numel()))
    pool, plain = HostPool(locked=True), HostPool(locked=False)
    first, lent = pool.take(100), pool.take(300)
    pool.give(first)
    assert pool.take(100) is first
    pool.give(first)
    plain.take(50)
    assert locked == [100, 300]
    pool.clear()
    assert pool.num_bytes == lent.num_bytes == 300
    assert pool.take(100) is not first


def test_pool_lends_the_smallest_buffer_that_fits() -> None:
    pool = HostPool(locked=False)
    for buffer in [pool.take(size) for size in (190, 110, 150)]:
        pool.give(buffer)
    assert [pool.take(100).num_bytes for _ in range(3)] == [110, 150, 190]


@pytest.mark.parametrize(
    ("error", "fetched"),
    [(0, True), (errno.EINVAL, False), (errno.ENOSYS, False), (errno.ENOMEM, None)],
    ids=["fetched", "old system", "no such call", "no memory"],
)
def test_pages_are_all_fetched_or_the_system_says_why_not(
    error: int, fetched: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, asked = torch.zeros(10000, dtype=torch.uint8), set()

    class Libc:
        def madvise(self, address: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
            asked.add(((address.value or 0) - memory.data_ptr(), length.value, advice))
            ctypes.set_errno(error)
            return -1 if error else 0

    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name, use_errno: Libc())
    monkeypatch.setattr(host_memory, "_PORTION", 4096)
    if fetched is None:
        with pytest.raises(OSError, match="No space left"):
            populate(memory)
    else:
        assert populate(memory) is fetched
    assert asked == {(0, 4096, 23), (4096, 4096, 23), (8192, 1808, 23)}  # 23: MADV_POPULATE_WRITE


MEMINFO = "MemTotal: 2000 kB\nMemFree: 100 kB\nMemAvailable: 1000 kB\n"
OF_VERSION_2 = {"memory.max": "500000", "memory.current": "300000", "memory.stat": "anon 1\ninactive_file 200000\n"}
OF_VERSION_1 = {
    "memory.limit_in_bytes": "500000",
    "memory.usage_in_bytes": "450000",
    "memory.stat": "total_inactive_file 50000\n",
}


def system(root: Path, cgroup: str, groups: dict[str, dict[str, str]]) -> Path:
    """A root folder with /proc and the control groups' files in /sys."""
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup}
    files |= {f"sys/fs/cgroup/{group}/{name}": text for group, found in groups.items() for name, text in found.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        ("", {}, 1_024_000),
        ("0::/\n", {}, 1_024_000),
        ("0::/jobs/7\n", {"jobs/7": OF_VERSION_2}, 400_000),
        ("0::/jobs/7\n", {"jobs": OF_VERSION_2, "jobs/7": {**OF_VERSION_2, "memory.max": "max"}}, 400_000),
        ("0::/jobs/7\n", {"": OF_VERSION_2}, 400_000),
        ("0::/\n", {"": {**OF_VERSION_2, "memory.max": "90000000"}}, 1_024_000),
        ("0::/\n", {"": {**OF_VERSION_2, "memory.current": "900000"}}, 0),
        ("5:cpu,memory:/docker/1\n4:pids:/\n0::/\n", {"memory": OF_VERSION_1}, 100_000),
        ("5:memory:/docker/1\n", {"memory/docker/1": OF_VERSION_1}, 100_000),
    ],
    ids=["no groups", "no limit", "a job", "a group around it", "a container", "more than there is", "used up",
         "version 1 in a container", "version 1"],
)  # fmt: skip
def test_host_memory_is_what_linux_and_every_control_group_have_left(
    tmp_path: Path, cgroup: str, groups: dict[str, dict[str, str]], expected: int
) -> None:
    assert available_bytes(system(tmp_path, cgroup, groups)) == expected


def test_host_memory_is_not_known_on_other_systems(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000 kB\n")
    assert available_bytes(tmp_path) == 0


def test_host_memory_of_this_machine() -> None:
    assert 2**20 < available_bytes() < 2**50


def test_own_memory_is_what_the_process_allocated_and_not_the_pages_of_its_files(tmp_path: Path) -> None:
    size = 2**26  # far more than what else changes meanwhile
    before = own_bytes()
    memory = torch.ones(size, dtype=torch.uint8)
    assert own_bytes() - before > size // 2
    path = tmp_path / "weights"
    path.write_bytes(memory.numpy())
    before = own_bytes()
    mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    assert int(mapped.sum()) == size  # read, and so in memory
    assert own_bytes() - before < size // 2
    assert own_bytes(tmp_path) == 0  # not known
