"""The lock of the rank that encodes: one at a time holds the turn, and leaves a note for those that wait.

Two ways to hold a turn, with one meaning: the kernel knows when its holder dies. `FileLock` is a lock on a file of the
cache directory. `StoreLock` is an entry in the store of the process group, for file systems without locks.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Literal

from wanshim.core.encoding.directory import CacheDirectory, CacheUnavailable, unavailable_on_oserror
from wanshim.core.ranks.store import set_once
from wanshim.core.shared.files import Lock
from wanshim.core.shared.processes import machine, process, process_state

State = Literal["encoding", "done", "failed", "uncached", "left"]

_NOTE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The note that the holder of a turn leaves.

    A note outlives its writer, its job and its boot, and carries no time: no two clocks agree. A rank recognises the
    notes left while it waited as those that were not there when it came.

    Args:
        machine: `wanshim.core.shared.processes.machine()` of the writer.
        job: `job_name()` of the writer.
        id: of this note and no other.
    """

    state: State
    rank: int
    pid: int
    machine: str
    job: str
    id: str
    reason: str = ""

    @property
    def who(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.machine.partition('/')[0]})"


def sign(state: State, rank: int, reason: str = "", *, job: str | None = None) -> Note:
    """A new note of this process; `job` is by default that of a process without a store."""
    job = job_name() if job is None else job
    return Note(
        state=state, rank=rank, pid=os.getpid(), machine=machine(), job=job, id=secrets.token_hex(8), reason=reason
    )


def job_name(store: Any = None) -> str:
    """A name that the ranks of one job share and no other job has.

    Args:
        store: the ranks' `torch.distributed` store, in which the first of them leaves a random name. Without one, the
            processes that one launcher started count as one job.
    """
    if store is None:
        return f"children of process {os.getppid()}"
    return bytes(store.compare_set("wanshim/encoding/job", "", secrets.token_hex(16))).decode()


class FileLock:
    """A turn that is a lock on `<name>.turn` in the cache directory, among all processes that see that file.

    Raises:
        LocksUnavailable: the file system has no locks.
        CacheUnavailable: the directory cannot be written.
    """

    def __init__(self, directory: CacheDirectory, name: str) -> None:
        with unavailable_on_oserror(f"cannot take turns in {directory.path}"):
            self._lock = Lock(directory.open_own(f"{name}.turn", os.O_RDWR | os.O_CREAT))
        try:
            if self._lock.release() is None:
                raise LocksUnavailable(f"{directory.path} has no file locks")
        except BaseException:
            self.close()
            raise

    def claim(self) -> bool:
        """Take the turn if it is free now; never waits."""
        return bool(self._lock.take())

    def last(self) -> Note | None:
        """The latest note that could be read, of whoever holds or held the turn."""
        return _parse(os.pread(self._lock.file, _NOTE_BYTES, 0))

    def write(self, note: Note) -> None:
        """Leave a note; only while holding the turn."""
        # Always the same size: a note can then be replaced even when the disk has filled up meanwhile.
        with unavailable_on_oserror("cannot write the turn's note"):
            os.pwrite(self._lock.file, _encode(note).ljust(_NOTE_BYTES), 0)

    def release(self) -> None:
        """Give the turn back, if it is held."""
        if self._lock.is_held:
            self._lock.release()

    def close(self) -> None:
        self._lock.close()


class LocksUnavailable(CacheUnavailable):
    """The cache directory can be used, but not locked."""


class StoreLock:
    """A turn in a `torch.distributed` store, among the ranks of this machine.

    An attempt belongs to the process whose name comes first to `holder/n`. It ends with a note of that process's, or
    with the process, and makes way for the next.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self._prefix = f"wanshim/encoding/{machine()}/{name}"
        self._attempt = 0
        self._last: Note | None = None
        self._is_held = False
        self._skip_ended()

    def claim(self) -> bool:
        self._skip_ended()
        mine = f"{secrets.token_hex(8)} {process()}"  # two threads may ask
        self._is_held = set_once(self._store, self._key("holder"), mine) == mine
        return self._is_held

    def last(self) -> Note | None:
        return self._read() or self._last

    def write(self, note: Note) -> None:
        self._store.set(self._key("note"), _encode(note).decode())

    def release(self) -> None:
        if not self._is_held:
            return
        self._is_held = False
        note = self._read()
        if note is None or note.state == "encoding":
            self.write(sign("left", note.rank if note else -1, job=note.job if note else None))

    def close(self) -> None:
        self.release()

    def _skip_ended(self) -> None:
        while self._is_over():
            self._attempt += 1

    def _is_over(self) -> bool:
        note = self._read()
        if note is not None:
            self._last = note
            if note.state != "encoding":
                return True
        key = self._key("holder")
        if not self._store.check([key]):
            return False
        return process_state(self._store.get(key).decode().partition(" ")[2]) == "ended"

    def _key(self, kind: str) -> str:
        return f"{self._prefix}/{kind}/{self._attempt}"

    def _read(self) -> Note | None:
        key = self._key("note")
        return _parse(self._store.get(key)) if self._store.check([key]) else None


LeaderLock = FileLock | StoreLock


def _encode(note: Note) -> bytes:
    """JSON that fits the file's fixed size; what does not fit is cut from the reason."""
    data = json.dumps(asdict(note)).encode()
    if len(data) <= _NOTE_BYTES:
        return data
    shorter = {**asdict(note), "reason": note.reason.encode("ascii", "replace").decode()[: _NOTE_BYTES // 8]}
    return json.dumps(shorter).encode()


def _parse(data: bytes) -> Note | None:
    """A note, or None where none was left, or it is being written at this moment."""
    try:
        return Note(**json.loads(data))
    except (ValueError, TypeError):
        return None
