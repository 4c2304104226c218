"""What ended a rank of `wanshim run --gpus`, for the launcher, which says it in one line after all have ended."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from wanshim import settings
from wanshim.errors import FeatureUnavailable

LONGEST = 1000  # characters of an error
# wanshim, Python, and what is no file at all
INSTALLED = (f"{Path(__file__).parents[2]}{os.sep}", f"{Path(os.__file__).parent}{os.sep}", "<")


def record_failure() -> None:
    """Arrange for it. A refusal is said by the launcher alone, since every rank has the same one."""
    file, print_traceback = settings.failure_file(), sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            _write(file, error, trace)
        if not isinstance(error, FeatureUnavailable):
            print_traceback(kind, error, trace)

    sys.excepthook = record


def _write(file: Path, error: BaseException, trace: TracebackType | None) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps({"error": text, "place": _place(trace)}))
    whole.replace(file)


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code, else of all."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)
    own = [frame for frame in frames if not is_installed(frame.filename)] or frames
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else "its start"


def is_installed(file: str) -> bool:
    """Whether a file is of Python, wanshim or an installed package, and not of the program."""
    return file.startswith(INSTALLED) or bool({"site-packages", "dist-packages"} & set(Path(file).parts))
