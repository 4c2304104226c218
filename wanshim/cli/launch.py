"""`wanshim run`: a program, and every Python process it starts, with wanshim active."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from wanshim import settings
from wanshim.boot.run_report import say
from wanshim.errors import WanshimError
from wanshim.interpreter_options import skipping_option_of

BOOT = Path(__file__).parent.parent / "boot" / "path"


def environment(
    features: str | None = None, *, report: bool = False, base: dict[str, str] | None = None
) -> dict[str, str]:
    """The variables that make every Python child activate wanshim: our folder first on PYTHONPATH."""
    result = dict(os.environ if base is None else base)
    # An empty part means the current folder: it is kept, unless the whole variable is empty.
    rest = result["PYTHONPATH"].split(os.pathsep) if result.get("PYTHONPATH") else []
    result["PYTHONPATH"] = os.pathsep.join([str(BOOT), *(part for part in rest if part != str(BOOT))])
    result[settings.RUN_PREFIX] = sys.prefix
    result.pop(settings.INHERITED, None)  # a run of its own, whatever started it
    if features is not None:
        result["WANSHIM_FEATURES"] = features
    if report:
        result.setdefault("WANSHIM_REPORT", "1")
    return result


def run(command: list[str], features: str | None, *, report: bool = True) -> NoReturn:
    """Become `command`. A `.py` file is run by this Python.

    Args:
        command: program and arguments, as without wanshim.
        features: WANSHIM_FEATURES for it; None leaves the environment's.
        report: each process that was patched says on standard error at its end what ran.

    Raises:
        WanshimError: there is no such program, or it cannot be executed.
    """
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    program = shutil.which(command[0])
    if program is None:
        raise WanshimError(
            f"no program {command[0]!r} on PATH", hint="Write the command as you would without wanshim, after --"
        )
    option = skipping_option_of(program, command[1:])
    if option:
        say(f"{option} makes Python pass over wanshim: {program} runs without it")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller
            stream.flush()
    try:
        os.execve(program, command, environment(features, report=report))  # noqa: S606 - the user's own command
    except OSError as error:
        raise WanshimError(
            f"{program} cannot be executed: {error.strerror}", hint="A script needs a first line such as #!/bin/sh"
        ) from error
