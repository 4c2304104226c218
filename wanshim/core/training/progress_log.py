"""The log of a run on disk: `run.json`, and an append-only JSON Lines file for each process and device.

    FOLDER/<run>/run.json                    what the run is; replaced as a whole, by rank 0 alone
    FOLDER/<run>/rank-00000.cuda-0.jsonl     one line a micro-step; start, checkpoint and end are lines too
    FOLDER/<run>/.rank-00000.lock            held by the process that logs as this rank

A line is one write to a file opened for appending, so a process killed at any moment leaves at most one torn
line, its last; the next attempt begins on a line of its own. Every start in the same folder is an attempt of
the same run, one after the other: a second job that starts meanwhile logs to `<run>-2`.

FOLDER may be one that others write too, /tmp for example. A run's folder belongs to the user who trains, its
files are opened relative to it, and no link is followed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wanshim.core.shared.files import Lock, NotOwn, OwnFolder
from wanshim.errors import WanshimError

log = logging.getLogger("wanshim")

SCHEMA = 1
OWN = "a folder of your own, without links"


def run_folder(folder: Path, output_path: str | Path) -> Path:
    """The log folder of the run that saves to `output_path`: the same folder in every process and every attempt.

    The name is that of the output folder and four digits of a hash of its full path, so that two `lora/` of
    different parents stay apart.
    """
    full = Path(output_path).resolve()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", full.name).strip(".-")[:60] or "run"
    return folder / f"{name}-{hashlib.sha256(str(full).encode()).hexdigest()[:4]}"


def file_name(rank: int, device: str) -> str:
    """`rank-00000.cuda-0.jsonl`: nothing a device may be called leaves the folder."""
    return f"rank-{rank:05d}.{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.jsonl"


def number(value: float | None) -> float | str | None:
    """A float as JSON can carry it: what is not finite becomes 'nan', 'inf' or '-inf'."""
    return value if value is None or math.isfinite(value) else str(value)


def write_run(folder: Path, description: Mapping[str, Any]) -> None:
    """Replace run.json as a whole.

    Raises:
        WanshimError: the folder is a link or belongs to somebody else.
        OSError: it cannot be written.
    """
    text = json.dumps({"schema": SCHEMA, **description}, indent=1, allow_nan=False)
    with _opened(folder) as opened:
        opened.write("run.json", text.encode(), 0o644)


@contextmanager
def _opened(folder: Path) -> Iterator[OwnFolder]:
    """A run's folder, which is made where it is missing."""
    try:
        opened = OwnFolder(folder, 0o755)
    except NotOwn as reason:
        raise WanshimError(f"{folder} {reason}", expected=OWN, hint="Log to another folder") from None
    with opened:
        mode = stat.S_IMODE(os.fstat(opened.descriptor).st_mode)
        if mode & 0o022:
            with suppress(OSError):  # a mount without modes
                os.fchmod(opened.descriptor, mode & ~0o022)
        yield opened


@contextmanager
def _own_file(name: str) -> Iterator[None]:
    try:
        yield
    except NotOwn as reason:
        raise WanshimError(f"{name} {reason}", expected="a log of your own", hint="Remove it") from None


class ProgressLog:
    """The files of one process. A full or vanished disk ends the log with one warning, not the training.

    Args:
        folder: of the run, see `run_folder`. Where another process logs as this rank of it, the log goes to
            `<folder>-2`, with a warning. Each rank decides for itself: two jobs of one size stay apart.
        devices: of this process; one file each, a device named twice once.

    Raises:
        WanshimError: the folder or a file in it is a link or belongs to somebody else.
        OSError: the log cannot be opened.
    """

    def __init__(self, folder: Path, rank: int, devices: Sequence[str]) -> None:
        self.devices = tuple(dict.fromkeys(devices))
        self._lock_name = f".rank-{rank:05d}.lock"
        self._run_folder, self._rank = folder, rank
        self._files: dict[str, int] = {}
        self._start: tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]] | None] | None = None
        self._open()

    def _open(self) -> None:
        self.folder, self._lock = _claim(self._run_folder, self._rank, self._lock_name)
        try:
            with _opened(self.folder) as opened:
                for device in self.devices:
                    self._files[device] = _open_log(file_name(self._rank, device), opened)
        except BaseException:
            self.close()
            raise

    def restore(self) -> bool:
        """Open new files if somebody has removed one, as a cleaner of /tmp does, and begin them with the start line.

        Returns:
            Whether it was so, and there are new ones.
        """
        with suppress(OSError):  # a share does not know a file any more that another host has removed
            if all(os.fstat(file).st_nlink for file in self._files.values()):
                return False
        try:
            self.close()
            self._open()
        except (OSError, WanshimError) as error:
            log.warning("wanshim: the progress log in %s was removed, and ends: %s", self.folder, error)
            return False
        log.warning("wanshim: the progress log in %s was removed, and begins anew", self.folder)
        if self._start is not None:
            self.write(*self._start)
        return True

    def write(self, record: Mapping[str, Any], by_device: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Append `record` to every device's file, with what `by_device` adds for it."""
        if record.get("event") == "start":
            self._start = record, by_device
        for device, file in list(self._files.items()):
            line = json.dumps({**record, **(by_device or {}).get(device, {})}, allow_nan=False, separators=(",", ":"))
            try:
                _append(file, line.encode() + b"\n")
            except OSError as error:
                log.warning("wanshim: the progress log of %s ends here: %s", device, error)
                os.close(self._files.pop(device))

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        if self._lock.file >= 0:
            with suppress(OSError):
                if os.fstat(self._lock.file).st_nlink:  # else it is another job's that has the name now
                    (self.folder / self._lock_name).unlink()
            self._lock.close()


def _claim(folder: Path, rank: int, name: str) -> tuple[Path, Lock]:
    """The first of `folder`, `folder-2`, ... in which nobody logs as `rank`, and the right to, until the process ends.
    On a file system without locks two jobs look like two attempts."""
    first = _lock(folder, name)
    if isinstance(first, Lock):
        return folder, first
    others = (folder.with_name(f"{folder.name}-{number_}") for number_ in itertools.count(2))
    other, claimed = next((each, lock) for each in others if isinstance(lock := _lock(each, name), Lock))
    log.warning(
        "wanshim: rank %d of this run is logged to %s already, by %s: two jobs save to one output folder, where each"
        " overwrites the other's checkpoints. This job is logged to %s. Give each job an output folder of its own.",
        rank,
        folder,
        first,
        other,
    )
    return other, claimed


def _lock(folder: Path, name: str) -> Lock | str:
    with _opened(folder) as opened, _own_file(name):
        return opened.claim(name, 0o644)


def _open_log(name: str, folder: OwnFolder) -> int:
    """Open a log for appending; a torn last line of a killed process is closed off first."""
    with _own_file(name):
        file = folder.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file


def _append(file: int, line: bytes) -> None:
    written = os.write(file, line)
    if written != len(line):
        raise OSError(f"{written} of {len(line)} bytes written")
