"""Files of this user in places that others may write too, such as /tmp: checked when opened, written whole, locked.

A folder is opened once and checked. Everything after that is relative to its descriptor, so that a folder or link that
is swapped in under the same path is never followed. `filelock` replaces none of this: it opens a path anew, past the
checked folder's descriptor, and where there are no locks a marker file of its outlives a killed process.

Importing this module imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

# What opening a name gives if a link, a folder, or a pipe or socket that nobody reads has it.
_NO_FILE = {errno.EISDIR: "is a directory", errno.ELOOP: "is a symbolic link", errno.ENXIO: "is not a regular file"}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}
F = TypeVar("F", bound="OwnFolder")
_LOCK, _PARTIAL = "lock", ".partial"


class NotOwn(Exception):
    """A name is that of something which is not this user's own, as the text says. The caller raises its own error."""


def prompt_cache() -> Path:
    """The folder of encoded prompts, unless a user names another. Without a home folder it is one that nobody makes."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/nonexistent")  # as the system's own users without a home have it
    return home / ".cache" / "wanshim" / "encoding"


def engine_folder() -> Path | None:
    """The folder of cuDNN's engines; None: this user has no home folder, and nothing is kept."""
    try:
        return Path.home() / ".cache" / "wanshim" / "convolutions"
    except RuntimeError:
        return None


class OwnFolder:
    """An open folder of this user.

    Args:
        mode: with which it is made if it is missing; None: it is not made.

    Raises:
        NotOwn: a link or no directory has the name, a file is above it, or the folder belongs to another user.
        OSError: it can neither be opened nor made.
    """

    def __init__(self, path: Path, mode: int | None = 0o700) -> None:
        self.path = path
        if mode is not None:
            _make(path, mode)
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise NotOwn("is a symbolic link" if path.is_symlink() else "is not a directory") from None
            raise
        owner = os.fstat(self.descriptor).st_uid
        if owner != os.geteuid() and owner != self._owner_of_a_new_file():
            self.close()
            raise NotOwn(f"belongs to user {owner}")

    def __enter__(self: F) -> F:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def opened(self) -> Path:
        """The path of the folder that was opened, whatever its own path leads to by now."""
        return Path(f"/proc/self/fd/{self.descriptor}")

    def _owner_of_a_new_file(self) -> int | None:
        """The user that this process is to the file system: a share may take root for nobody. None where it may not
        write."""
        name = _unguessable(".owner.")
        try:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)
        except OSError:
            return None
        try:
            return os.fstat(file).st_uid
        finally:
            os.close(file)
            os.unlink(name, dir_fd=self.descriptor)

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a regular file of the folder's owner, under this name alone, never through a link. The caller closes it.

        Args:
            flags, mode: as for `os.open`.

        Raises:
            NotOwn: something else has the name.
            OSError: it cannot be opened.
        """
        try:
            file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise NotOwn(_NO_FILE[error.errno]) from None
            raise
        found = os.fstat(file)
        reason = ""
        if not stat.S_ISREG(found.st_mode):
            reason = "is not a regular file"
        elif found.st_uid != os.fstat(self.descriptor).st_uid:
            reason = f"belongs to user {found.st_uid}"
        elif found.st_nlink > 1:
            reason = "is another name of a file"
        if reason:
            os.close(file)
            raise NotOwn(reason)
        return file

    def write(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Put `data` at `name`, whole or not at all."""
        write_whole(self.opened / name, data, mode)

    def claim(self, name: str, mode: int = 0o600) -> Lock | str:
        """The lock on the file `name`, with a note in it of who has it; or who has it instead of this one, in words.

        Raises:
            NotOwn, OSError: as `open`.
        """
        while True:
            lock = Lock(self.open(name, os.O_RDWR | os.O_CREAT, mode))
            if lock.take() is False:
                holder = os.pread(lock.file, 256, 0).decode(errors="replace")
                lock.close()
                return holder or "another process"
            if os.fstat(lock.file).st_nlink:  # else its last holder removed it meanwhile
                with suppress(OSError):  # a full disk
                    os.ftruncate(lock.file, 0)
                    os.pwrite(lock.file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return lock
            lock.close()

    def remove_abandoned(self, start: str = ".", end: str = _PARTIAL) -> None:
        """Remove the temporary folders with such names whose processes were killed; those of `write` by default. Where
        the file system has no locks, nothing is removed."""
        for name in os.listdir(self.descriptor):  # noqa: PTH208, a descriptor has no Path
            if name.startswith(start) and name.endswith(end):
                remove_abandoned(self.opened / name)


class Lock:
    """An exclusive lock on an open file, which `close` closes. It ends with this process: no forked child has it.

    Args:
        file: descriptor, open for writing.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        self.is_held = False
        _locks.add(self)

    def take(self) -> bool | None:
        """Take the lock if it is free, without a wait: whether it is held now. None: the file system has no locks."""
        try:
            found = self._call(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX leaves the choice
            return False
        self.is_held = bool(found)
        return found

    def release(self) -> bool | None:
        """Give the lock back, if it is held. None: the file system has no locks."""
        self.is_held = False
        return self._call(fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, which gives the lock back."""
        # First: a child that is forked once the file is closed would close the next one that has its number.
        file, self.file, self.is_held = self.file, -1, False
        if file >= 0:
            os.close(file)

    def _call(self, operation: int) -> bool | None:
        try:
            fcntl.flock(self.file, operation)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        return True


_locks: WeakSet[Lock] = WeakSet()


def _close_in_child() -> None:
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)  # else a lock would last as long as a child that shares it


def read_file(folder: Path, name: str, most: int = 1 << 16) -> bytes:
    """The first bytes of a file in a folder of this user, which is not made.

    Raises:
        NotOwn, OSError: as of `OwnFolder`.
    """
    with OwnFolder(folder, None) as opened, os.fdopen(opened.open(name, os.O_RDONLY), "rb") as file:
        return file.read(most)


@contextmanager
def written_whole(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give the body a path to write to; the file there takes the name `target` when the body ends without an error.

    The path lies in a temporary folder beside `target`: two jobs that write one `target` never write one file, and no
    link is followed. A body that writes nothing leaves `target` as it is. Whoever is killed leaves `.NAME.*.partial`,
    which nobody reads.

    Args:
        durable: the file is on the disk before it has its name.

    Raises:
        FileNotFoundError: there is no folder for `target`.
    """
    with temporary_folder(target.parent, f".{target.name}.", _PARTIAL) as folder:
        part = folder / f"{target.name}{_PARTIAL}"
        yield part
        if part.exists():
            if durable:
                _flush(part, os.O_NOFOLLOW)
            part.replace(target)
            if durable:
                with suppress(OSError):  # not every file system flushes folders
                    _flush(target.parent)


def write_whole(target: Path, data: bytes, mode: int = 0o666, *, durable: bool = True) -> None:
    """Put `data` at `target`, whole or not at all: see `written_whole`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with written_whole(target, durable=durable) as part, os.fdopen(os.open(part, flags, mode), "wb") as file:
        file.write(data)


@contextmanager
def temporary_folder(parent: Path, start: str, end: str = "") -> Iterator[Path]:
    """A new folder whose name nobody can guess and that this user alone can enter; it is removed at the end. Its lock
    ends with this process, so that `remove_abandoned` knows one whose process was killed."""
    while (lock := _lock_of(folder := parent / _unguessable(start, end))) is None:
        pass  # it was taken for one of a killed process before it had its lock
    try:
        yield folder
    finally:
        lock.close()  # first: a network share keeps an open file in the folder
        try:
            (folder / _LOCK).unlink()
            folder.rmdir()
        except OSError:  # there is more in it
            _remove(folder)


def remove_abandoned(folder: Path) -> None:
    """Remove a `temporary_folder` if its process was killed, and it is this user's."""
    with suppress(OSError, NotOwn), OwnFolder(folder, None) as opened:
        lock = opened.claim(_LOCK)
        if isinstance(lock, Lock):
            if lock.is_held:
                _remove(folder)
            lock.close()
            folder.rmdir()


def _lock_of(folder: Path) -> Lock | None:
    """The lock of a new folder; None if another process has removed it."""
    folder.mkdir(0o700)
    try:
        with OwnFolder(folder, None) as opened:
            lock = opened.claim(_LOCK)
    except FileNotFoundError:
        return None
    return None if isinstance(lock, str) else lock


def _make(path: Path, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=mode)
    except (FileExistsError, NotADirectoryError):
        raise NotOwn("would lie in a file") from None
    with suppress(FileExistsError):
        path.mkdir(mode=mode)


def _remove(folder: Path) -> None:
    import shutil  # needed by few: not at the start of every program

    shutil.rmtree(folder, ignore_errors=True)


def _unguessable(start: str, end: str = "") -> str:
    return f"{start}{os.urandom(8).hex()}{end}"


def _flush(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
