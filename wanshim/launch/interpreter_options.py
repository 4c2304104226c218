"""The kind of a program: a shell, or Python and the options under which it reads no sitecustomize from PYTHONPATH, so
that `wanshim run` cannot reach it. And why a program cannot be started."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from wanshim.errors import WanshimError

SHELLS = ("sh", "ash", "bash", "csh", "dash", "fish", "ksh", "tcsh", "zsh")
SKIPPING = "IES"  # isolated, ignore the environment, no site


def skipping_option(arguments: Sequence[str]) -> str:
    """The first such option among those that follow `python`, as -I, -E or -S; "" where there is none.

    What follows the script, -c or -m is the program's own and is not looked at.
    """
    rest = iter(arguments)
    for argument in rest:
        if not re.match("-[A-Za-z?]", argument):
            return ""
        for place, letter in enumerate(argument[1:], start=2):
            if letter in SKIPPING:
                return f"-{letter}"
            if letter in "cm":
                return ""
            if letter in "WX":  # what is left of the argument, or the next one, is its value
                if place == len(argument):
                    next(rest, None)
                break
    return ""


def _shebang(program: str) -> str:
    """A script's first line, from #! on; "" of another file."""
    try:
        with Path(program).open("rb") as file:
            first = file.readline(512).decode(errors="replace")
    except OSError:
        return ""
    return first.removesuffix("\n") if first.startswith("#!") else ""


def is_shell(program: str) -> bool:
    """Whether it is a shell, or a script for one."""
    interpreter = _shebang(program)[2:].split()
    return any(Path(word).name in SHELLS for word in (program, *interpreter))


def is_python(program: str) -> bool:
    return re.fullmatch(r"(python|pypy)[\d.]*t?", Path(program).name) is not None


def not_found(name: str) -> WanshimError:
    """The error for a program that `shutil.which` does not find."""
    hint = "Write the command as you would without wanshim, after --"
    if os.sep not in name:
        if "=" in name:
            hint = f"Write env before it: env {name} python train.py"
        elif os.path.isfile(name):  # noqa: PTH113
            hint = f"Write ./{name}, or what runs it before it"
        return WanshimError(f"no program {name!r} on PATH", hint=hint)
    if not os.path.exists(name):  # noqa: PTH110 - Path.exists raises for a folder that may not be read
        return WanshimError(f"no file {name!r}", hint=hint)
    if os.path.isdir(name):  # noqa: PTH112
        return WanshimError(f"{name!r} is a folder", expected="a program", hint=hint)
    return WanshimError(f"{name!r} may not be executed", hint=f"Run `chmod +x {name}`, or write what runs it before it")


def not_started(program: str, error: OSError) -> WanshimError:
    """The error for a program that the system did not start.

    Args:
        program: path of what was to be executed.
        error: of execve, or of the fork before it.
    """
    shebang = _shebang(program)
    if error.errno == errno.ENOENT:  # it exists, so what runs it does not
        what = f"its first line {shebang!r} names" if shebang else "it needs"
        named = shebang[2:].strip(" \t").split(" ")[0]
        hint = "Remove the \\r, which belongs to the name" if named.endswith("\r") else None
        return WanshimError(f"{program} cannot be executed: {what} a program that does not exist", hint=hint)
    hints = {
        errno.ENOEXEC: "A script needs a first line such as #!/bin/sh",
        errno.EACCES: "What runs it may not be executable, or its file system is mounted noexec",
        errno.E2BIG: "An argument or a variable is too long, or all together are: see `getconf ARG_MAX`",
    }
    return WanshimError(f"{program} cannot be executed: {error.strerror}", hint=hints.get(error.errno or 0))
