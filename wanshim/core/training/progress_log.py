"""The log of a run on disk: `run.json`, and an append-only JSON Lines file for each process and device.

    FOLDER/<run>/run.json                    what the run is; replaced as a whole, by rank 0 alone
    FOLDER/<run>/rank-00000.cuda-0.jsonl     one line a micro-step; start, checkpoint and end are lines too

A line is one write to a file opened for appending, so a process killed at any moment leaves at most one torn
line, its last; the next attempt begins on a line of its own. Every start in the same folder is an attempt of
the same run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("wanshim")

SCHEMA = 1


def run_folder(folder: Path, output_path: str | Path) -> Path:
    """Where the run that saves to `output_path` logs: the same folder in every process and every attempt.

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
    """Replace run.json as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".run.json.{os.getpid()}"
    partial.write_text(json.dumps({"schema": SCHEMA, **description}, indent=1, allow_nan=False), encoding="utf-8")
    partial.replace(folder / "run.json")


class ProgressLog:
    """The files of one process. A full or vanished disk ends the log with one warning, not the training.

    Args:
        folder: of the run, see `run_folder`.
        devices: of this process; one file each, a device named twice once.
    """

    def __init__(self, folder: Path, rank: int, devices: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.devices = tuple(dict.fromkeys(devices))
        self._files = {device: _open(folder / file_name(rank, device)) for device in self.devices}

    def write(self, record: Mapping[str, Any], by_device: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Append `record` to every device's file, with what `by_device` adds for it."""
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


def _open(path: Path) -> int:
    """Open for appending; a torn last line of a killed process is closed off first."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file


def _append(file: int, line: bytes) -> None:
    written = os.write(file, line)
    if written != len(line):
        raise OSError(f"{written} of {len(line)} bytes written")
