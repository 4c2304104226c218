"""Digests of a model folder by content, without reading it twice.

The content of a text encoder is 11 to 23 GB. It is hashed once; afterwards the folder is recognised by the
names, sizes, times and inode numbers of its files, as `git status` does, and no file in it is opened. Those alone would
not do as the key: a checkpoint that was touched, moved or copied would be encoded again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

from wanshim.core.encoding.directory import CacheDirectory, CacheUnavailable
from wanshim.core.shared.files import NotOwn
from wanshim.errors import WanshimError

_log = logging.getLogger(__name__)

_FORMAT = "wanshim.files/1"
# A file that is changed twice within one tick of the file system's clock keeps its times.
_CLOCK_TICK_S = 0.05
_CHUNK = 1 << 22
_READERS = 8


@dataclass(frozen=True, slots=True)
class FileStamp:
    """One file as the file system describes it; `name` is relative to its folder."""

    name: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Folder:
    """The regular files below `path` (hidden ones left out), in order of name."""

    path: Path
    stamps: tuple[FileStamp, ...]
    scanned_at: float = field(compare=False)  # this process's monotonic clock

    @property
    def token(self) -> str:
        """SHA-256 of what the file system says of the folder: changes whenever a file does."""
        described = [[s.name, s.size, s.modified_ns, s.changed_ns, s.inode] for s in self.stamps]
        return sha256_json([str(self.path), described])


def scan(path: Path) -> Folder:
    """Describe the files below `path` by `stat` alone; links are followed, as a model loader follows them.

    Raises:
        WanshimError: `path` is no folder, or holds no file, a link to a file that is missing, or a pipe, socket or
            device.
    """
    root = Path(path).resolve()
    try:
        stamps = tuple(sorted(_stamps(root), key=lambda stamp: stamp.name))
    except FileNotFoundError as error:
        raise WanshimError(
            f"The file {error.filename!r} is missing, or is a link to a missing one",
            expected="a complete checkpoint",
            hint="Download the checkpoint again",
        ) from error
    if not stamps:
        raise WanshimError(
            f"The folder {str(path)!r} holds no file",
            expected="the folder of a text encoder or tokenizer",
            hint="Download the checkpoint first, or correct the model path",
        )
    return Folder(root, stamps, time.monotonic())


def known_digest(folder: Folder, directory: CacheDirectory) -> str | None:
    """The content digest noted for `folder`; None where it is not known, or the note cannot be trusted."""
    name = _note_name(folder)
    try:
        data = directory.read(name)
        return None if data is None else _read_note(data, folder)
    except NotOwn as reason:
        directory.set_aside(name)
        _log.warning("%s %s; reading %s again", directory.path / name, reason, folder.path)
        return None


def content_digest(folder: Folder, directory: CacheDirectory) -> str:
    """SHA-256 over the names and contents of `folder`'s files, noted in `directory` for next time.

    Raises:
        WanshimError: a file changed while it was read, or is no regular file any more.
    """
    _let_clock_tick(folder)
    with ThreadPoolExecutor(_READERS) as readers:
        digests = list(readers.map(_sha256_file, [folder.path / stamp.name for stamp in folder.stamps]))
    if scan(folder.path) != folder:
        raise WanshimError(
            f"The folder {str(folder.path)!r} changed while it was read",
            hint="Wait until the checkpoint is complete, then start again",
        )
    digest = sha256_json([[s.name, found] for s, found in zip(folder.stamps, digests, strict=True)])
    _note(folder, digest, directory)
    return digest


def _stamps(root: Path) -> Iterable[FileStamp]:
    for parent, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if name.startswith("."):
                continue
            path = Path(parent, name)
            status = path.stat()
            _refuse_endless(path, status)
            relative = path.relative_to(root).as_posix()
            yield FileStamp(relative, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _let_clock_tick(folder: Folder) -> None:
    """Wait until a file that changes after it was read shows another time of change than `folder` has.

    The times themselves are compared with no clock: files are dated in the future by another machine, by the program
    that unpacked them, or by a clock that was set back since.
    """
    time.sleep(max(0.0, folder.scanned_at + _CLOCK_TICK_S - time.monotonic()))


def _refuse_endless(path: Path, status: os.stat_result) -> None:
    if not S_ISREG(status.st_mode):
        raise WanshimError(
            f"{str(path)!r} is no regular file, so reading it may never end",
            expected="files, or links to files",
            hint="Move the pipe, socket or device out of the model's folder",
        )


def _sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0, opener=_without_waiting) as file:
        _refuse_endless(path, os.fstat(file.fileno()))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe that took the file's name has no writer


def sha256_json(value: object) -> str:
    """A digest of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _note_name(folder: Folder) -> str:
    return f"{folder.token}.files.json"


def _note(folder: Folder, digest: str, directory: CacheDirectory) -> None:
    entry: dict[str, str] = {"digest": digest, "format": _FORMAT, "path": str(folder.path)}
    entry["sha256"] = sha256_json(entry)
    try:
        directory.discard_parts(_note_name(folder))
        directory.write(_note_name(folder), json.dumps(entry).encode())
    except CacheUnavailable as reason:
        # The digest is only asked for again; whoever stores the embeddings reports a directory that is full.
        _log.info("%s", reason)


def _read_note(data: bytes, folder: Folder) -> str:
    try:
        entry = json.loads(data)
        claimed = entry.pop("sha256")
        right = entry["format"] == _FORMAT and entry["path"] == str(folder.path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotOwn("is no note of this cache, or is damaged") from error
    if not right or sha256_json(entry) != claimed:
        raise NotOwn("is damaged: its checksum does not match")
    return str(entry["digest"])
