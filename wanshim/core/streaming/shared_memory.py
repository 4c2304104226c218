"""One copy of the waiting weights for all ranks of a host.

The ranks map one file of shared memory. What passes between them is its path, through the process group's
store; nothing is pickled. The file has no name any more as soon as all have mapped it, so that no crash
leaves it behind.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wanshim.core.ranks.rendezvous import Absent, Failed, Rendezvous
from wanshim.core.ranks.store import default_store, wait_for
from wanshim.core.shared.forks import Owner
from wanshim.core.shared.host_memory import mapped, populate
from wanshim.core.shared.processes import machine
from wanshim.errors import HostMemoryInvalid, WanshimError
from wanshim.values import checked_seconds

DIRECTORY = Path("/dev/shm")  # noqa: S108 - shared memory; the file is made exclusively, for this user alone
TIMEOUT_S = 300.0
_HINT = "Look for the first error in the log of that rank"
MEETINGS = WRITTEN, COMPARED = "written", "compared"  # what every rank has done when they meet


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of this machine: which of them this is, and how they find each other.

    Args:
        store: the process group's store.
        name: of this machine, the same for its ranks and no one else's.
        timeout_s: seconds to wait for another rank of it.

    Raises:
        SettingInvalid: `timeout_s` cannot be waited.
    """

    local_rank: int = 0
    local_size: int = 1
    store: Any = None
    name: str = ""
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        checked_seconds(self.timeout_s, "timeout_s")

    @property
    def shown(self) -> str:
        """Its name in messages, without the boot."""
        return self.name.partition("/")[0]

    @staticmethod
    def of_process_group(local_rank: int, local_size: int) -> LocalRanks:
        """As launchers number them; alone where there is no process group."""
        store = default_store() if local_size > 1 else None
        return LocalRanks() if store is None else LocalRanks(local_rank, local_size, store, machine())


class Shared:
    """Memory of `num_bytes` that all ranks of the host see. `leads`: this rank writes it, the others read.

    Args:
        writable: of the rank that leads, where `memory` is mapped privately: what is written here all ranks see.
    """

    def __init__(self, memory: torch.Tensor, host: LocalRanks, key: str, writable: torch.Tensor | None = None) -> None:
        self.memory = memory
        self.writable = writable
        self.leads = host.local_rank == 0
        self._host = host
        self._key = key
        self._owner = Owner("shared host memory")

    def meet(self, what: str, error: BaseException | None = None) -> None:
        """Wait until every rank of the host has come here.

        Raises:
            WanshimError: a rank came with an error, or not in time; every other rank raises this.
        """
        host = self._host
        if host.local_size == 1:
            return
        self._owner.check()
        _meet(host, f"{self._key}/{what}", error)

    def abandon(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one, now or later, that it will not come. Waits for nobody."""
        if self._host.local_size > 1:
            for what in MEETINGS:
                _meet(self._host, f"{self._key}/{what}", error)


_shares = 0


def allocate(num_bytes: int, host: LocalRanks, directory: Path = DIRECTORY, *, private: bool = False) -> Shared:
    """Host memory, uint8 and flat, zero at first. All ranks of a host call this in the same order.

    Args:
        private: what a rank writes to the memory, no other sees; the rank that leads has `writable` besides.

    Raises:
        HostMemoryInvalid: there is not that much room.
        WanshimError: another rank of the host failed or did not come.
    """
    global _shares
    _shares += 1
    key = f"wanshim/streaming/{host.name}/{_shares}"
    if host.local_size == 1:
        return Shared(_own(num_bytes), host, key)
    path: Path | None = None
    memory, writable, error = None, None, None
    try:
        if host.local_rank == 0:
            path, memory = _create(num_bytes, directory)
            if private:
                memory, writable = _map(path, num_bytes, private=True), memory
            host.store.set(f"{key}/path", str(path))
        else:
            memory = _map(Path(_path_of(host, key)), num_bytes, private=private)
    except BaseException as raised:
        error = raised
        if host.local_rank == 0:
            host.store.set(f"{key}/path", "")
    try:
        _meet(host, f"{key}/mapped", error)
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    if error is not None:
        raise error
    assert memory is not None
    return Shared(memory, host, key, writable)


def _create(num_bytes: int, directory: Path) -> tuple[Path, torch.Tensor]:
    path = directory / f"wanshim-{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            os.ftruncate(descriptor, num_bytes)
            memory = mapped(descriptor, num_bytes)
            if not populate(memory):
                os.posix_fallocate(descriptor, 0, num_bytes)  # a file with holes would be a SIGBUS later
        except (OSError, ValueError, OverflowError) as error:
            path.unlink(missing_ok=True)
            room = os.statvfs(directory)
            raise HostMemoryInvalid(
                f"{num_bytes / 2**30:.2f} GiB of shared memory in {directory}: {error}",
                expected=f"that much room; {room.f_bavail * room.f_frsize / 2**30:.2f} GiB are free",
                topic="shared_memory",
            ) from None
        return path, memory
    finally:
        os.close(descriptor)


def _own(num_bytes: int) -> torch.Tensor:
    """For a rank that is alone on its host."""
    try:
        memory = mapped(-1, num_bytes)
        populate(memory)
    except OSError as error:
        raise HostMemoryInvalid(
            f"{num_bytes / 2**30:.2f} GiB of host memory: {error}",
            expected="that much free RAM",
            hint="Look at `free -g`; or stream fewer blocks",
        ) from None
    return memory


def _map(path: Path, num_bytes: int, *, private: bool = False) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_size != num_bytes or found.st_uid != os.getuid():
            raise WanshimError(
                f"{path} has {found.st_size} bytes and belongs to user {found.st_uid}",
                expected=f"{num_bytes} bytes of user {os.getuid()}: the ranks load different models",
            )
        memory = mapped(descriptor, num_bytes, private=private)
        if not private:  # else each page would be this rank's own
            populate(memory)
        return memory
    finally:
        os.close(descriptor)


def _path_of(host: LocalRanks, key: str) -> str:
    if not wait_for(host.store, [f"{key}/path"], host.timeout_s):
        raise WanshimError(
            f"local rank 0 of {host.shown} offered no shared memory in {host.timeout_s:.0f} s",
            hint="Look for the first error in its log",
        )
    path = str(host.store.get(f"{key}/path").decode())
    if not path:
        raise WanshimError(f"local rank 0 of {host.shown} could not make the shared memory", hint="See its log")
    return path


def _meet(host: LocalRanks, key: str, error: BaseException | None) -> None:
    """Wait until all ranks are here or one of them fails; with an `error`, end the meeting and wait for nobody."""
    rendezvous = Rendezvous(host.store, key, host.local_rank, host.local_size)
    if error is not None:
        rendezvous.fail(f"local rank {host.local_rank} of {host.shown} failed: {type(error).__name__}: {error}")
        return
    try:
        rendezvous.meet(None, host.timeout_s)
    except Absent as reason:
        absent = sorted(reason.never + reason.left)
        text = f"local ranks {absent} of {host.shown} did not come to {key} in {host.timeout_s:.0f} s"
        rendezvous.fail(text)
        raise WanshimError(text, hint=_HINT) from None
    except Failed as reason:
        raise WanshimError(str(reason), hint=_HINT) from None
