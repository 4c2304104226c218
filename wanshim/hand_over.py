"""Variables that a process hands to those that it starts, and that nobody sets by hand: `activate()` its features and
torch's allocator, and `wanshim run` the rank and the files in which a rank says what ended it.

A rank's failure file is in the run's folder, and beside it the files of `mark_reached` and `mark_done`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from wanshim.settings import ALLOCATOR, FEATURES, Settings

RUN_PREFIX = "WANSHIM_RUN_PREFIX"  # set by `wanshim run`: whose Python it belongs to
# Set by `wanshim run`: the file in which a rank says what ended it; with `--gpus`, the number of the rank and of all
# ranks, as in 0/2.
RUN_FAILURE, RUN_RANK = "WANSHIM_RUN_FAILURE", "WANSHIM_RUN_RANK"
# Set by `wanshim run` and `wanshim generate`: a line for each variable that they have set: the option that it stands
# for, a tab and the assignment.
RUN_OPTIONS = "WANSHIM_RUN_OPTIONS"
INHERITED = "WANSHIM_INHERITED"  # set by activate() for the processes that this one starts, removed by deactivate()
EXPANDABLE = "expandable_segments:True"


def hand_down(text: str | None) -> None:
    """Have processes that this one starts carry the same features, where `wanshim run` or a plugin reaches them.

    Args:
        text: the argument of `activate`, which beats WANSHIM_FEATURES there too; None: they read WANSHIM_FEATURES.
    """
    os.environ[INHERITED] = FEATURES if text is None else text or "auto"


def hand_down_nothing() -> None:
    """Take `hand_down` and `expand_segments` back."""
    os.environ.pop(INHERITED, None)
    while _own_allocator:
        name, before, set_to = _own_allocator.pop()
        if os.environ.get(name) != set_to:
            continue  # somebody else has written it since
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_own_allocator: list[tuple[str, str | None, str]] = []  # what `expand_segments` wrote: name, value before, value


def expand_segments(read: Settings, torch_started: bool, root: Path = Path("/")) -> Settings:
    """Have torch's allocator leave few gaps between tensors, in this process and those that it starts. Once torch has
    started it is too late; and what the user says of expandable segments, or of another allocator, stays. A GPU that
    another system lends (WSL2) or that is divided (MIG) may refuse the driver's virtual memory, at the first tensor or
    at a later one, which torch does not survive: see pytorch issue 192330.

    Args:
        root: where /dev and /proc are.

    Returns:
        the settings with what holds now.
    """
    name = next((name for name in ALLOCATOR if os.environ.get(name)), ALLOCATOR[-1])
    before = os.environ.get(name)
    if torch_started or any(word in (before or "").lower() for word in ("expandable_segments", "cudamallocasync")):
        return read
    if (root / "dev/dxg").exists() or any(root.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*")):
        return read
    os.environ[name] = f"{before},{EXPANDABLE}" if before else EXPANDABLE
    _own_allocator.append((name, before, os.environ[name]))
    return replace(read, expandable_segments=True)


def inherited() -> str | None:
    """The text that a parent gave `activate`; None where it gave none, or there is no such parent."""
    text = os.environ.get(INHERITED)
    return None if text == FEATURES else text or None


def as_written(name: str) -> str:
    """The option of `wanshim run` that set this variable, such as `--gpus 1`, else the name itself."""
    asked = (line.partition("\t")[::2] for line in os.environ.get(RUN_OPTIONS, "").splitlines())
    assigned = f"{name}={os.environ.get(name)}"
    return next((option for option, variable in asked if variable == assigned), name)


def as_given(name: str, value: object) -> str:
    """`as_written`, with its value where that is the variable."""
    written = as_written(name)
    return f"{name}={value}" if written == name else written


def has_parent() -> bool:
    """Whether `wanshim run`, or a process that was activated, has started this one, and has looked at its variables."""
    return any(os.environ.get(name) for name in (INHERITED, RUN_PREFIX))


def has_python_parent() -> bool:
    """Whether a Python process that was activated has started this one; to be asked before `activate`."""
    return INHERITED in os.environ


def asked_for() -> bool:
    """Whether a parent was activated, or WANSHIM_FEATURES or `wanshim run` asks for wanshim in this process."""
    return bool(os.environ.get(FEATURES)) or has_parent()


def has_run() -> bool:
    """Whether `wanshim run` or `wanshim generate` has started this process or one above it."""
    return bool(os.environ.get(RUN_PREFIX))


def run_rank() -> tuple[int, int] | None:
    """The number of this process's rank and of all ranks, in a job of `wanshim run --gpus`."""
    rank, _, count = os.environ.get(RUN_RANK, "").partition("/")
    return (int(rank), int(count)) if rank.isdecimal() and count.isdecimal() else None


def numbered() -> tuple[int, int] | None:
    """The rank of this process and the number of ranks as torch reads them."""
    rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return (int(rank), int(count)) if rank.isdecimal() and count.isdecimal() else None


def is_program() -> bool:
    """Whether this process is the program of `wanshim run`, perhaps behind `uv run`, and none that it starts."""
    return program_pid() == os.getpid()


_claimed: list[int] = []


def claim_program() -> bool:
    """`is_program`, for what a program starts once: True at the first call alone."""
    first = is_program() and os.getpid() not in _claimed
    _claimed.append(os.getpid())
    return first


def is_rank() -> bool:
    """Whether this process is the program of a rank of `wanshim run --gpus`."""
    return run_rank() is not None and is_program()


def failure_file() -> Path:
    """The file in which a rank that `wanshim run --gpus` started says what ended it."""
    return Path(os.environ[RUN_FAILURE])


def mark_reached() -> None:
    """Leave a file that says to `wanshim run` that wanshim is in its command, and which process is the program: the
    last one that no Python with wanshim has started, since a recipe has several in turn."""
    if os.environ.get(RUN_FAILURE) and not has_python_parent():
        failure = failure_file()
        with suppress(OSError):  # this process outlives the launcher, or is on another machine
            failure.unlink(missing_ok=True)  # of the program before
            whole = failure.with_suffix(f".{os.getpid()}")
            whole.write_text(str(os.getpid()))
            whole.replace(reached_file(failure))


def leave_rank() -> None:
    """Take `mark_reached` of a rank back, for a program that this process starts in its place."""
    if is_rank():
        reached_file(failure_file()).unlink(missing_ok=True)


def mark_done(ability: str) -> None:
    """Leave a file that says that a feature with this ability did its work in a process of this rank."""
    if os.environ.get(RUN_FAILURE):
        with suppress(OSError):  # as in `mark_reached`
            failure_file().with_suffix(f".{ability}").touch()


def is_done(ability: str) -> bool:
    """Whether a process of this rank has called `mark_done`: the program may start another that trains for it."""
    return bool(os.environ.get(RUN_FAILURE)) and failure_file().with_suffix(f".{ability}").exists()


def program_pid() -> int | None:
    """The process of `mark_reached`; None: there is none yet, or no `wanshim run`."""
    try:
        return int(reached_file(failure_file()).read_text())
    except (OSError, KeyError, ValueError):
        return None


def reached_file(failure: Path) -> Path:
    """The file of `mark_reached`, of the rank with that `failure_file`."""
    return failure.with_suffix(".reached")
