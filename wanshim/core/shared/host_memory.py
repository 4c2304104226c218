"""Host memory that a GPU reads and writes by itself while it computes.

A copy to or from ordinary memory goes through a staging buffer and holds the host thread; page-locked memory
is read over the link in the background. Locking is slow (every page is touched), so buffers are kept.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wanshim.core.shared.text import first_line
from wanshim.errors import HostMemoryInvalid, WanshimError

logger = logging.getLogger("wanshim")
_refusals: list[str] = []  # to lock pages
PAGE = mmap.PAGESIZE
THREADS = min(8, os.cpu_count() or 1)
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of this process
_POPULATE_WRITE = 23  # madvise(2): MADV_POPULATE_WRITE, since Linux 5.14
_FIXED, _NO_RESERVE = 0x10, 0x4000  # mmap(2): MAP_FIXED, MAP_NORESERVE
_PORTION = 2**26
UNNAMED = "wanshim-weights"  # of files in memory, in /proc
# Files of a control group of version 2 and of version 1: the limit, what is used, and the file cache in that.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be allocated: what Linux counts as available, and no more than a control group of
    this process (a container, a job of a batch system) has left, its file cache counted as free. 0 where that is
    not known, as on other systems.

    Args:
        root: where /proc and /sys are.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
        found = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 0
    return min([found, *(_left(group, *names) for group, names in _control_groups(root))])


def own_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process allocated, without pages of files, which count as available, and without shared
    memory; what a fork left to it is counted. 0 where that is not known.

    Args:
        root: where /proc is.
    """
    try:
        status = (root / "proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 0


def _control_groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The groups whose limits this process keeps; a container sees its own as the root, whatever its name outside."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                mount, names = ("", _VERSION_2) if controllers == "" else ("memory", _VERSION_1)
                path = Path(name.lstrip("/"))
                for group in (path, *path.parents):
                    yield root / "sys/fs/cgroup" / mount / group, names


def _left(group: Path, limit: str, used: str, cache: str) -> int:
    try:
        most = int((group / limit).read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())[cache]
        return max(0, most - int((group / used).read_text()) + int(cached))
    except (OSError, ValueError, KeyError):  # without a limit, or without such a group
        return sys.maxsize


@contextmanager
def room_for(num_bytes: int, purpose: str, *, added: int | None = None) -> Iterator[None]:
    """The body allocates that much host memory.

    Args:
        purpose: for messages.
        added: bytes of it that are not taken already; None: all.

    Raises:
        HostMemoryInvalid: the host has not that much.
    """
    available, what = available_bytes(), f"{num_bytes / 2**30:.2f} GiB of host memory for {purpose}"
    expected, hint = "that much free RAM", "Look at `free -g`, and at the memory limit of the container"
    if available:
        expected += f"; {available / 2**30:.2f} GiB are available"
    if 0 < available < (num_bytes if added is None else added):
        raise HostMemoryInvalid(what, expected=expected, hint=hint)
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryInvalid(f"{what}: {error}", expected=expected, hint=hint) from error


def unnamed_file(num_bytes: int) -> int:
    """Descriptor of a new file in memory, which has no name and lasts as long as somebody has it open or mapped. A
    container's limit on /dev/shm does not hold for it."""
    descriptor = os.memfd_create(UNNAMED)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int, num_bytes: int, *, private: bool = False) -> torch.Tensor:
    """Memory of a file, or with descriptor -1 of this process and those forked from it: uint8, flat, beginning with a
    page.

    Args:
        private: what is written here stays out of the file.
    """
    memory = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY if private else mmap.ACCESS_DEFAULT)
    return _in_large_pages(memory)


def side_by_side(descriptors: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Memory of several files, one behind the other: uint8, flat. Threads fill several files faster than one, whose
    pages Linux adds one at a time.

    Args:
        sizes: bytes of each, whole pages.

    Raises:
        OSError: the system cannot map them.
    """
    region = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = ctypes.c_int, ctypes.c_int, ctypes.c_int
    libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *numbers, ctypes.c_long
    libc.mmap.restype = ctypes.c_void_p
    access, flags, place = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, memory.data_ptr()
    for descriptor, size in zip(descriptors, sizes, strict=True):
        if libc.mmap(place, size, access, flags, descriptor, 0) != place:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        place += size
    return _in_large_pages(region)  # which unmaps all of it when the last tensor of it is gone


def of_this_process(num_bytes: int) -> torch.Tensor:
    """As `mapped`, of memory that no other process has, a forked one neither. Linux gives large pages for it where it
    gives none for shared memory, and so several times as many bytes a second."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy all pages that are locked
    return _in_large_pages(memory)


def _in_large_pages(memory: mmap.mmap) -> torch.Tensor:
    with suppress(OSError, AttributeError):  # where the system allows them: fewer to fetch and to lock
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def populate(memory: torch.Tensor) -> bool:
    """Fetch all pages of such memory now, by several threads; False on a system that cannot.

    Raises:
        OSError: there are not that many; to write to them later would end the process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = memory.data_ptr(), memory.numel()

    def fetch(begin: int) -> int:
        length = min(_PORTION, size - begin)
        done = libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(length), _POPULATE_WRITE)
        return ctypes.get_errno() if done else 0

    with ThreadPoolExecutor(THREADS) as pool:
        failed = {error for error in pool.map(fetch, range(0, size, _PORTION)) if error}
    if failed and failed <= {errno.EINVAL, errno.ENOSYS}:
        return False
    if failed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return True


def page_lock(
    memory: torch.Tensor,
    parts: Sequence[int] = (),
    device: torch.device | None = None,
    wait: Callable[[int], bool] | None = None,
) -> weakref.finalize[Any, Any]:
    """Lock the pages of a contiguous host tensor for all GPUs; the result, called, unlocks them.

    They are unlocked at the latest when the tensor object dies. What the system refuses to lock, mostly for want of
    memory or by `ulimit -l`, stays as it is, with a warning: copies of it are right, and hold the host thread.

    Args:
        parts: where to begin anew, in bytes and whole pages, so that several threads lock at once. A copy must
            stay within one part.
        device: whose CUDA context is used; default: the current device's.
        wait: called with the number of a part before it is locked; False: it stays as it is.
    """
    runtime: Any = torch.cuda.cudart()
    address, size = memory.data_ptr(), memory.numel() * memory.element_size()
    bounds = [0, *parts, size]
    if device is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())

    def lock(part: int) -> int | None:
        if wait is not None and not wait(part):
            return None
        begin, end = bounds[part : part + 2]
        with torch.cuda.device(device) if device is not None else nullcontext():  # a thread begins on the first one
            return int(runtime.cudaHostRegister(address + begin, end - begin, _PORTABLE))

    # In threads that end: CUDA keeps an error for the thread it came to, and torch's next kernel there would raise it.
    with ThreadPoolExecutor(min(THREADS, len(bounds) - 1)) as pool:
        errors = list(pool.map(lock, range(len(bounds) - 1)))
    locked = [address + begin for begin, error in zip(bounds, errors, strict=False) if error == 0]
    if any(errors):
        _warn_of_refusal(f"CUDA error {max(filter(None, errors))} for {size / 2**30:.2f} GiB")
    storage = memory.untyped_storage()  # keeps the pages mapped until they are unlocked
    unlock = weakref.finalize(memory, _unlock, locked, storage)
    unlock.atexit = False  # the process gives everything back anyway, and CUDA may be gone by then
    return unlock


def _warn_of_refusal(cause: str) -> None:
    """Once in a process."""
    if not _refusals:
        slow = f"host memory cannot be page-locked, copies take longer: {cause}"
        logger.warning("%s", WanshimError(slow, topic="locked_memory"))
    _refusals.append(cause)


def pinned(like: torch.Tensor) -> torch.Tensor:
    """A small host tensor of `like`'s shape and dtype that a GPU writes by itself, or a plain one if the system refuses
    to lock pages."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    except RuntimeError as error:
        _warn_of_refusal(first_line(error))
        return torch.empty(like.shape, dtype=like.dtype)


def release_pinned() -> None:
    """Return the page-locked memory that torch's allocator keeps of tensors that are gone."""
    torch._C._host_emptyCache()


def _unlock(addresses: Sequence[int], storage: torch.UntypedStorage) -> None:
    runtime: Any = torch.cuda.cudart()
    for address in addresses:
        runtime.cudaHostUnregister(address)


@dataclass(eq=False)
class Buffer:
    """`memory`: uint8, flat. `free_from`: the event after which it may be written again."""

    memory: torch.Tensor
    free_from: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return int(self.memory.numel())


class HostPool:
    """Buffers of host memory, locked once and used again; plain memory where there is no GPU to lock it for."""

    def __init__(self, *, locked: bool) -> None:
        self.locked = locked
        self.num_bytes = 0  # of all buffers, lent or not
        self._free: list[Buffer] = []

    def take(self, num_bytes: int) -> Buffer:
        """A buffer of at least that size: the smallest free one that is not twice too big, else a new one."""
        fitting = [b for b in self._free if num_bytes <= b.num_bytes <= 2 * num_bytes]
        if fitting:
            buffer = min(fitting, key=lambda b: b.num_bytes)
            self._free.remove(buffer)
            return buffer
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        if self.locked:
            page_lock(memory)
        self.num_bytes += num_bytes
        return Buffer(memory)

    def give(self, buffer: Buffer) -> None:
        self._free.append(buffer)

    def clear(self) -> None:
        """Let go of the buffers that are not lent."""
        self.num_bytes -= sum(buffer.num_bytes for buffer in self._free)
        self._free.clear()


def view_of(memory: torch.Tensor, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A tensor of `like`'s shape, strides and dtype in flat uint8 memory; `like` is dense."""
    size = like.numel() * like.element_size()
    return memory[offset : offset + size].view(like.dtype).as_strided(like.shape, like.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whatever order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
