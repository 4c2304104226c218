"""A folder that the program makes once on one GPU, made once by the ranks of `wanshim run --gpus`.

A program that makes its output folder, and ends if the folder exists, would end all ranks but the first to come. In a
rank, a folder that another rank of the same run has just made counts as made by this one, once. Where the folder was
there before the run, or the rank makes it a second time, it exists. This holds for calls of os.makedirs and Path.mkdir
by the program itself: libraries use the same calls, and os.mkdir, as a lock between processes.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from wanshim import hand_over
from wanshim.launch.boot.rank import is_installed

_WAIT_S = 0.5  # for the rank that has made the folder to note it


def share() -> None:
    """Let the ranks of this run make folders together, in this process and until it ends."""
    os.makedirs = _once_by_all(os.makedirs)
    pathlib.Path.mkdir = _once_by_all(pathlib.Path.mkdir)  # type: ignore[method-assign]


def _once_by_all(original: Callable[..., None]) -> Callable[..., None]:
    notes = hand_over.failure_file()  # in the run's folder, under this rank's number

    @wraps(original)
    def make(path: Any, *args: Any, **kwargs: Any) -> None:
        ours = not is_installed(sys._getframe(1).f_code.co_filename)
        made = not os.path.lexists(path)
        try:
            original(path, *args, **kwargs)
        except FileExistsError:
            made = ours and pathlib.Path(path).is_dir() and _made_by_another(path)
            if not made:
                raise
        if ours and made:
            with suppress(OSError):  # this process outlives the launcher, which took the run's folder along
                _note(path).touch()

    def _note(path: Any) -> pathlib.Path:
        full = os.fsencode(os.path.realpath(path))
        return notes.with_name(f"made-{hashlib.sha256(full).hexdigest()[:16]}.{notes.name}")

    def _made_by_another(path: Any) -> bool:
        mine, end = _note(path), time.monotonic() + _WAIT_S
        while not (others := [*mine.parent.glob(f"{mine.stem}.*")]) and time.monotonic() < end:
            time.sleep(0.02)
        return bool(others) and mine not in others

    return make
