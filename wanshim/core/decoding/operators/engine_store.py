"""Which engine of cuDNN is the fastest for a convolution on this GPU, kept on disk from process to process.

One small JSON file for each convolution, in a folder of this user alone. A file names numbers that cuDNN checks, and
no code. What cannot be read or written is searched for again: the store never fails a decode.

A file is written under a random name, locked until it has its own. What is found unlocked under such a name was left by
a writer that was killed, and the next one removes it: no clock is compared.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from wanshim.core.shared.own_folder import NotOwn, open_file, open_folder, read_file

from .cudnn_graph import Engine

Facts: TypeAlias = dict[str, Any]  # what a convolution is: values that JSON has


_PART = ".partial"


class EngineStore:
    """Engines by the facts of their convolution.

    Args:
        folder: made with mode 0700 at the first write; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, facts: Facts) -> tuple[Engine | None, bool]:
        """The engine kept for `facts` (None: torch's own choice is the fastest), and whether anything is kept."""
        try:
            if self.folder is None:
                return None, False
            entry = json.loads(read_file(self.folder, _name(facts)))
            if entry["facts"] != _plain(facts):
                return None, False
            kept = entry["engine"]
            if kept is None:
                return None, True
            knobs = {str(name): int(value) for name, value in kept["knobs"].items()}
            return Engine(int(kept["number"]), knobs), True
        except (OSError, NotOwn, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None, False

    def put(self, facts: Facts, engine: Engine | None) -> None:
        """Keep the engine of `facts`, if the folder can be written."""
        kept = None if engine is None else {"number": engine.number, "knobs": dict(engine.knobs)}
        text = json.dumps({"facts": _plain(facts), "engine": kept}, indent=1) + "\n"
        with suppress(OSError, NotOwn, RuntimeError):
            self._write(_name(facts), text.encode())

    def _write(self, name: str, data: bytes) -> None:
        if self.folder is None:
            return
        folder = open_folder(self.folder, 0o700)
        part = f".{secrets.token_hex(8)}{_PART}"
        try:
            _remove_left_parts(folder)
            with os.fdopen(open_file(part, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise
        finally:
            os.close(folder)


def _remove_left_parts(folder: int) -> None:
    """Remove what killed writers left; a file that another process writes now is locked."""
    for name in os.listdir(folder):
        if name.endswith(_PART):
            with suppress(OSError, NotOwn), os.fdopen(open_file(name, folder, os.O_RDONLY), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)


def _plain(facts: Facts) -> Any:
    """The facts as JSON gives them back."""
    return json.loads(json.dumps(facts))


def _name(facts: Facts) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32] + ".json"
