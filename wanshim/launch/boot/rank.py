"""A process as a rank of `wanshim run --gpus`: that it is the one, and what ended it, for the launcher to say once."""

from __future__ import annotations

import atexit
import json
import os
import stat
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from wanshim import hand_over
from wanshim.core.shared.files import write_whole
from wanshim.core.shared.processes import process_start
from wanshim.core.shared.text import named_message
from wanshim.errors import FeatureUnavailable
from wanshim.process_report import say

LONGEST = 1000  # characters of an error
LEAVE_OUT = "Leave the launcher out: wanshim run --gpus N -- python train.py"
# wanshim, Python, and what is no file at all
INSTALLED = (f"{Path(__file__).parents[2]}{os.sep}", f"{Path(os.__file__).parent}{os.sep}", "<")


def enter() -> None:
    """Tell `wanshim run` that wanshim is in its command's program; end a process that contradicts the rank it is in,
    before the first line of its program. For processes that no Python with wanshim has started the second part looks
    whether another program is the rank already."""
    given = hand_over.run_rank()
    if given is not None:
        found, first = hand_over.numbered(), hand_over.program_pid()
        if found not in (None, given) and found[1] > 1:  # type: ignore[index]
            refuse(refusal(f"what starts processes itself: one came up as rank {found[0]} of {found[1]}"))  # type: ignore[index]
        is_running = first not in (None, os.getpid()) and process_start(first) is not None  # type: ignore[arg-type]
        if is_running and not hand_over.has_python_parent():
            refuse(refusal("what starts processes itself: two programs came up as one rank"))
        if not hand_over.has_python_parent() and sys.argv[0] in ("", "-") and not _is_file(0):
            refuse(
                refusal("a program that comes through a pipe, which one process alone can read", "Write it to a file")
            )
    hand_over.mark_reached()


def _is_file(descriptor: int) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    return False


def no_program(count: int, found: str, hint: str = LEAVE_OUT) -> FeatureUnavailable:
    """The error for a command of `wanshim run --gpus` that is no program for one GPU."""
    return FeatureUnavailable(f"--gpus {count} with {found}", expected="the command that trains on one GPU", hint=hint)


def refusal(found: str, hint: str = LEAVE_OUT) -> str:
    """The sentence of that error in a rank."""
    return str(no_program((hand_over.run_rank() or (0, 1))[1], found, hint))


def refuse(sentence: str) -> NoReturn:
    """End this process with status 2 and the sentence, which a rank leaves to the launcher of all ranks."""
    if hand_over.run_rank() is not None:
        _write({"refusal": sentence})
    else:
        say(sentence)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(2)  # Python would go on behind an exception of its start-up, and a launcher restart what raises


def record_failure() -> None:
    """Write what ends this process to the rank's file. A refusal is said by the launcher alone: every rank has it."""
    print_traceback = sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt) and not _is_refused():
            text = named_message(error)
            if len(text) > LONGEST:  # the cause may come last, behind what a program that failed has printed
                text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
            _write({"error": text, "place": _place(trace)})
        if not isinstance(error, FeatureUnavailable):
            print_traceback(kind, error, trace)

    sys.excepthook = record


def leave_job_at_exit() -> None:
    """Have torch's process groups aborted, as their deletion does: a program for one GPU knows of none, and torch
    prints a warning of those that are deleted. To destroy them would wait for ranks that may not come."""
    process = os.getpid()

    def leave() -> None:
        dist = sys.modules.get("torch.distributed")
        if dist is None or getattr(sys, "last_value", None) is not None or os.getpid() != process:
            return
        with suppress(Exception):  # not every release of torch has the function, nor every backend the method
            if dist.is_available() and dist.is_initialized():
                dist.distributed_c10d._abort_process_group()

    atexit.register(leave)


def _is_refused() -> bool:
    """Whether a process of this rank was refused: what ends its parent behind that is no error of its own."""
    with suppress(OSError, ValueError):
        return "refusal" in json.loads(hand_over.failure_file().read_text())
    return False


def _write(found: dict[str, str]) -> None:
    write_whole(hand_over.failure_file(), json.dumps({**found, "pid": os.getpid()}).encode(), durable=False)


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code, else of all."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)
    own = [frame for frame in frames if not is_installed(frame.filename)] or frames
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else "its start"


def is_installed(file: str) -> bool:
    """Whether a file is of Python, wanshim or an installed package, and not of the program."""
    return file.startswith(INSTALLED) or bool({"site-packages", "dist-packages"} & set(Path(file).parts))
