"""A state on disk: one safetensors file, with what is not a tensor as JSON in its header and a checksum of both.

    FOLDER/run-1/step-00000120.safetensors      FOLDER/run-1 is one run, and run-2 the one that was begun anew after it

A file has its name only when it is complete and on the disk. Two are kept of a run; those of other runs are never
touched. Nothing is pickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from wanshim.core.shared.files import NotOwn, OwnFolder, read_file, written_whole
from wanshim.errors import ResumeInvalid

if TYPE_CHECKING:
    import torch

log = logging.getLogger("wanshim")

_RUN = re.compile(r"run-(\d+)")
_STATE = re.compile(r"step-(\d{8,})\.safetensors")
_MOST_HEADER = 2**26  # bytes
_FACTS, _CHECKSUM = "wanshim.state", "wanshim.checksum"  # keys of the header


@dataclass(frozen=True)
class RunState:
    """Args:
    facts: of JSON.
    tensors: on the CPU, contiguous.
    """

    facts: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def bytes(self) -> int:
        """Size of its tensors and facts: the generators' states in these outweigh a small LoRA."""
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        return len(json.dumps(self.facts)) + tensors


def latest_run(folder: Path) -> Path | None:
    """The run that was begun last, of those that have a state, or None."""
    runs = {int(match[1]): path for path in _entries(folder) if (match := _RUN.fullmatch(path.name))}
    found = {number: path for number, path in runs.items() if _steps(path)}
    return found[max(found)] if found else None


def new_run(folder: Path) -> Path:
    """The folder of a run that begins anew: a folder that no run with a state has."""
    latest = latest_run(folder)
    return folder / f"run-{1 if latest is None else int(latest.name.removeprefix('run-')) + 1}"


def write_state(run: Path, step: int, state: RunState) -> Path:
    """Write the state of `step`, then remove what was kept for it: all but the one before.

    Raises:
        ResumeInvalid: the folder is a link or another user's.
        OSError, safetensors.SafetensorError: it cannot be written, and what was there is as it was.
    """
    from safetensors.torch import save_file

    _check_folder(run)
    target = run / f"step-{step:08d}.safetensors"
    facts = json.dumps(state.facts)
    with written_whole(target) as part:
        save_file(state.tensors, part, {_FACTS: facts, _CHECKSUM: _checksum(facts, state.tensors)})
    steps = _steps(run)
    before = max((other for other in steps if other < step), default=step)
    for other, path in steps.items():
        if other not in (step, before):  # a later one was damaged and passed over
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # the state is saved nevertheless
                log.warning("wanshim: an older state stays: %s", error)
    return target


def newest_state(run: Path) -> tuple[Path, RunState] | None:
    """The newest state that is whole; one that is damaged is passed over with a warning."""
    for _, path in sorted(_steps(run).items(), reverse=True):
        try:
            return path, read_state(path)
        except ResumeInvalid as error:
            log.warning("wanshim: passed over: %s", error)
    return None


def newest_facts(folder: Path) -> tuple[Path, dict[str, Any] | None] | None:
    """The newest state below `folder` and the facts of its header, None if it cannot be read; None without a state.

    Torch is not imported, and no tensor is read or verified.

    Raises:
        ResumeInvalid: a folder is not readable.
    """
    run = latest_run(folder)
    if run is None:
        return None
    _, path = max(_steps(run).items())
    with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        facts = json.loads(json.loads(file.read(min(size, _MOST_HEADER)))["__metadata__"][_FACTS])
        return path, {**facts, "position": dict(facts["position"]), "identity": dict(facts["identity"])}
    return path, None


def read_state(path: Path) -> RunState:
    """Raises:
    ResumeInvalid: the file is damaged, no state, or not this user's own.
    """
    from safetensors import SafetensorError, safe_open

    try:
        read_file(path.parent, path.name, most=0)  # it is this user's own
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
        if _checksum(header[_FACTS], tensors) != header[_CHECKSUM]:
            raise ResumeInvalid(f"{path} is damaged: its checksum is another")
        return RunState(json.loads(header[_FACTS]), tensors)
    except (OSError, NotOwn, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, ResumeInvalid):
            raise
        raise ResumeInvalid(f"{path} is damaged or no state: {type(error).__name__}: {error}") from None


def check_writable(run: Path) -> None:
    """Make the folder if it is missing.

    Raises:
        ResumeInvalid: no state can be written to it.
    """
    try:
        _check_folder(run)
        TemporaryFile(dir=run).close()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # training goes on without, with a warning at each save
            raise _unusable(run, error) from None


def forget_partial(run: Path) -> None:
    """Remove what a killed process was writing."""
    for path in _entries(run):
        if path.name.startswith(".step-") and path.name.endswith(".partial"):
            shutil.rmtree(path, ignore_errors=True)


def _steps(run: Path) -> dict[int, Path]:
    files = (path for path in _entries(run) if not path.is_dir())
    return {int(match[1]): path for path in files if (match := _STATE.fullmatch(path.name))}


def _entries(folder: Path) -> list[Path]:
    """Raises:
    ResumeInvalid: it is no folder, or not readable.
    """
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unusable(folder, error) from None


def _unusable(folder: Path, error: OSError) -> ResumeInvalid:
    return ResumeInvalid(f"{folder}: {error.strerror}", expected="a folder that states can be written to")


def _check_folder(run: Path) -> None:
    """Made if it is missing."""
    try:
        OwnFolder(run).close()
    except NotOwn as reason:
        raise ResumeInvalid(f"{run} {reason}", expected="a folder of your own, without links") from None


def _checksum(facts: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the facts and of every tensor's name, dtype, shape and bytes."""
    import torch  # states are looked for without it

    found = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()
