"""Files that have their name only when they are complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Give the body a path to write to; the file there takes the name `target` when the body ends without an error.

    The path lies in a new folder beside `target`, whose name nobody can guess and which this user alone can enter: two
    jobs that write one `target` never write one file, and no link is followed. The file is on the disk before it has
    its name. A body that writes nothing leaves `target` as it is. Whoever is killed leaves `.NAME.*.partial`, which
    nobody reads.

    Raises:
        FileNotFoundError: there is no folder for `target`.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        part = folder / f"{target.name}.partial"
        yield part
        if part.exists():
            _flush(part, os.O_NOFOLLOW)
            part.replace(target)
            with suppress(OSError):  # not every file system flushes folders
                _flush(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
