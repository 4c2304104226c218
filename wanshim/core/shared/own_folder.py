"""Folders of this user in a place that others may write too, such as /tmp.

A folder is opened once and checked. Everything after that is relative to its descriptor, so that a folder or link that
is swapped in under the same path is never followed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

# What opening a name gives if a link, a folder, or a pipe or socket that nobody reads has it.
_NO_FILE = {errno.EISDIR: "is a directory", errno.ELOOP: "is a symbolic link", errno.ENXIO: "is not a regular file"}


class NotOwn(Exception):
    """What has the name is not this user's own; the text says what it is. The caller raises an error of its own."""


def prompt_cache() -> Path:
    """Where encoded prompts are kept unless a user names another folder."""
    return Path.home() / ".cache" / "wanshim" / "encoding"


def engine_folder() -> Path | None:
    """Where cuDNN's engines are kept; None: this user has no home folder, and nothing is kept."""
    try:
        return Path.home() / ".cache" / "wanshim" / "convolutions"
    except RuntimeError:
        return None


def open_folder(path: Path, mode: int) -> int:
    """A descriptor of the folder `path`, which is made with `mode` if it is missing. The caller closes it.

    Raises:
        NotOwn: a link or no directory has the name, a file is above it, or the folder belongs to another user.
        OSError: it can neither be opened nor made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=mode)
    except (FileExistsError, NotADirectoryError):
        raise NotOwn("would lie in a file") from None
    with suppress(FileExistsError):
        path.mkdir(mode=mode)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotOwn("is a symbolic link" if path.is_symlink() else "is not a directory") from None
        raise
    owner = os.fstat(folder).st_uid
    if owner != os.geteuid() and owner != _owner_of_a_new_file(folder):
        os.close(folder)
        raise NotOwn(f"belongs to user {owner}")
    return folder


def _owner_of_a_new_file(folder: int) -> int | None:
    """Who this process is to the file system: a share may take root for nobody. None where it may not write."""
    name = f".owner.{secrets.token_hex(8)}"
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.fstat(file).st_uid
    finally:
        os.close(file)
        os.unlink(name, dir_fd=folder)


def open_file(name: str, folder: int, flags: int, mode: int = 0o600) -> int:
    """Open `name` in a folder of this user: a regular file of the folder's owner, under this name alone.

    Args:
        folder: descriptor.
        flags, mode: as for `os.open`.

    Raises:
        NotOwn: something else has the name.
        OSError: it cannot be opened.
    """
    try:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotOwn(_NO_FILE[error.errno]) from None
        raise
    found = os.fstat(file)
    reason = ""
    if not stat.S_ISREG(found.st_mode):
        reason = "is not a regular file"
    elif found.st_uid != os.fstat(folder).st_uid:
        reason = f"belongs to user {found.st_uid}"
    elif found.st_nlink > 1:
        reason = "is another name of a file"
    if reason:
        os.close(file)
        raise NotOwn(reason)
    return file


def read_file(folder: Path, name: str, most: int = 1 << 16) -> bytes:
    """The first bytes of a file in a folder of this user, which is not made.

    Raises:
        NotOwn, OSError: as `open_folder` and `open_file`.
    """
    if not folder.is_dir():
        raise FileNotFoundError(name)
    opened = open_folder(folder, 0o700)
    try:
        with os.fdopen(open_file(name, opened, os.O_RDONLY), "rb") as file:
            return file.read(most)
    finally:
        os.close(opened)
