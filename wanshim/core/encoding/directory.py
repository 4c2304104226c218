"""The cache directory: a folder of this user, used through its descriptor only, that nobody else can write."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wanshim.core.shared.files import NotOwn, OwnFolder
from wanshim.errors import WanshimError

_log = logging.getLogger(__name__)

# Errors that mean "this directory cannot be used", as opposed to a fault in the program.
_UNUSABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EMFILE,
    errno.ENOENT,
    errno.ENOLCK,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
}


class CacheUnavailable(Exception):
    """The cache cannot be used here; the caller does without it. Never leaves this package."""


@contextmanager
def unavailable_on_oserror(doing: str) -> Iterator[None]:
    """Turn an operating-system refusal into `CacheUnavailable`, and let every other error through."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        raise CacheUnavailable(f"{doing}: {error.strerror or error}") from error


class CacheDirectory(OwnFolder):
    """An open, checked directory that only its owner can write.

    Args:
        path: the directory; created with mode 0700 where it is missing.

    Raises:
        WanshimError: `path` is a symbolic link or no directory, belongs to somebody else, or others may write
            to it (or replace it, through a parent that everybody may write and that has no sticky bit).
        CacheUnavailable: it can neither be opened nor made.
    """

    def __init__(self, path: Path) -> None:
        try:
            with unavailable_on_oserror(f"cannot make or open {path}"):
                super().__init__(path)
        except NotOwn as reason:
            raise WanshimError(
                f"The cache directory {str(path)!r} {reason}",
                expected="a directory of your own",
                hint="Remove it",
                topic="cache_directory",
            ) from None
        try:
            _refuse_shared(path, os.fstat(self.descriptor))
        except BaseException:
            self.close()
            raise

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open our own regular file `name`, which nobody else can write.

        Raises:
            NotOwn: something is there that this user's wanshim did not write.
        """
        file = super().open(name, flags, mode)
        found = stat.S_IMODE(os.fstat(file).st_mode)
        if found & 0o022:
            os.close(file)
            raise NotOwn(f"has mode {found:04o}, so others can write it")
        return file

    def open_own(self, name: str, flags: int) -> int:
        """Open our own regular file `name`; what somebody else left under that name is set aside first.

        Raises:
            CacheUnavailable: it cannot be set aside.
        """
        try:
            return self.open(name, flags)
        except NotOwn as reason:
            _log.warning("%s %s; setting it aside", self.path / name, reason)
            self.set_aside(name)
        try:
            return self.open(name, flags)
        except NotOwn as reason:
            raise CacheUnavailable(f"{self.path / name} {reason}") from reason

    def read(self, name: str) -> bytes | None:
        """The bytes of our own regular file `name`; None where there is none.

        Raises:
            NotOwn: something is there that this user's wanshim did not write, or that cannot be read.
        """
        doing = "opened"
        try:
            fd = self.open(name, os.O_RDONLY)
            doing = "read"  # a share's file may go away meanwhile, and a disk may fail
            with os.fdopen(fd, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NotOwn(f"cannot be {doing} ({error.strerror})") from error

    def write(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Put `data` at `name` whole or not at all, readable by the owner alone.

        Raises:
            CacheUnavailable: the directory is read-only or full.
        """
        with unavailable_on_oserror(f"cannot write {self.path / name}"):
            super().write(name, data, mode)

    def set_aside(self, name: str) -> str | None:
        """Rename `name` out of the way and return its new name; None where it cannot be moved."""
        aside = f"{name}.rejected-{secrets.token_hex(4)}"
        try:
            (self.opened / name).rename(self.opened / aside)
        except OSError:
            return None
        return aside

    def discard_parts(self, name: str) -> None:
        """Remove what writers of `name` left when they were killed; a file that is being written is locked and stays.

        Two turns can write one name: copies of a checkpoint have turns of their own, and equal content. Where the file
        system has no locks, nothing is removed.
        """
        self.remove_abandoned(f".{name}.")


def _refuse_shared(path: Path, status: os.stat_result) -> None:
    expected = "a directory that nobody else can write (mode 0700)"
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise WanshimError(
            f"The cache directory {str(path)!r} has mode {mode:04o}",
            expected=expected,
            hint=f"Run `chmod 700 {path}`",
            topic="cache_directory",
        )
    parent = path.parent.stat()
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        raise WanshimError(
            f"Everybody can replace the cache directory {str(path)!r}: its parent has mode "
            f"{stat.S_IMODE(parent.st_mode):04o} and no sticky bit",
            expected=expected,
            hint=f"Run `chmod o-w {path.parent}`",
            topic="cache_directory",
        )
