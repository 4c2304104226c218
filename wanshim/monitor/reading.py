"""Reads a log that anyone may have written, piece by piece: bounded work, bounded memory, nothing trusted."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 8 * 2**20
LARGEST = 3.4e38  # of a float32: a loss can be that large, and nothing derived from two such numbers overflows
LONGEST_S = 1e9  # thirty years
LATEST = 1e11  # seconds since 1970: later is no time
MOST_STEPS = 10**12
LONGEST_LINE = 64 * 2**10
LARGEST_RUN_JSON = 2**20
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


class Tail:
    """A JSON Lines file that grows. `read` gives the next records, at most CHUNK bytes' worth.

    Half lines wait for their rest; lines that are too long or no JSON object are counted in `damaged`.
    A file that was replaced or shortened is read anew, which `restarted` shows. `fault` says why the last
    `read` found nothing to read: the file is gone, or may not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self.behind = 0  # bytes not read yet
        self.restarted = False
        self.fault = ""
        self.modified = 0.0  # by the clock of the file system, seconds since 1970
        self._offset = 0
        self._inode = 0
        self._rest = b""
        self._skipping = False

    def read(self) -> Iterator[dict[str, Any]]:
        data = self._next_bytes()
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            record = None if self._skipping else _record(line)
            self._skipping = False
            if record is not None:
                yield record
            elif line.strip():
                self.damaged += 1
        if len(self._rest) > LONGEST_LINE:
            self._rest, self._skipping = b"", True

    @property
    def size(self) -> int:
        """Bytes of the file when it was read last."""
        return self._offset + self.behind

    def _next_bytes(self) -> bytes:
        self.restarted, self.fault = False, ""
        try:
            file = open_plain(self.path)
            try:
                return self._read_on(file)
            finally:
                os.close(file)
        except OSError as error:
            self.fault, self.behind = error.strerror or str(error), 0
            return b""

    def _read_on(self, file: int) -> bytes:
        found = os.fstat(file)
        if self._inode and (found.st_ino != self._inode or found.st_size < self._offset):
            self._offset, self._rest, self._skipping, self.restarted = 0, b"", False, True
        self._inode, self.modified = found.st_ino, found.st_mtime
        data = os.pread(file, CHUNK, self._offset)
        self._offset += len(data)
        self.behind = max(0, found.st_size - self._offset) if data else 0
        return data


def open_plain(path: Path) -> int:
    """Open a regular file for reading, not a link, a pipe or a device.

    Raises:
        OSError: it is something else, or cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no regular file")
    return file


def _record(data: bytes, longest: int = LONGEST_LINE) -> dict[str, Any] | None:
    if len(data) > longest:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_run_json(folder: Path) -> dict[str, Any] | None:
    """run.json of a run's folder; None where it is missing, too large or no JSON object."""
    try:
        file = open_plain(folder / "run.json")
    except OSError:
        return None
    try:
        data = os.pread(file, LARGEST_RUN_JSON + 1, 0)
    finally:
        os.close(file)
    return _record(data, LARGEST_RUN_JSON)


def finite(value: object, *, most: float = LARGEST) -> float | None:
    """A number from -`most` to `most`; None for anything else, NaN and infinities included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -most <= value <= most:
        return None
    return float(value)


def instant(value: object) -> float | None:
    """Seconds since 1970; None for anything else."""
    found = finite(value, most=LATEST)
    return found if found is not None and found >= 0 else None


def whole(value: object, *, most: int = 2**53) -> int | None:
    """A whole number from zero to `most`; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        return None
    return value


def text(value: object, most: int = 200) -> str:
    """A string to show, cut; everything else is empty. It is one line of printable characters: no escape of a
    terminal, no half of a character, nothing that turns the line around."""
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in value[:most])
