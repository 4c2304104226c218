"""What runs a command, perhaps behind `env` or `uv run`: a shell, or Python, and the options under which it reads no
sitecustomize from PYTHONPATH, so that `wanshim run` cannot reach it. And why a program cannot be started."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from wanshim.errors import WanshimError

SHELLS = ("sh", "ash", "bash", "csh", "dash", "fish", "ksh", "tcsh", "zsh")
SKIPPING = "IES"  # isolated, ignore the environment, no site
# What runs the command behind its own options, as it is or in a project's environment.
WRAPPERS = (
    *("chrt", "ionice", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time", "timeout"),
    *("conda", "hatch", "mamba", "micromamba", "pdm", "pipenv", "pixi", "poetry", "rye", "uv"),
)
# Their options before a value that may look like a program.
WRAPPER_TAKING_A_VALUE = (
    *("-C", "-P", "-e", "-n", "-p", "-w", "--cwd", "--directory", "--environment", "--extra", "--group", "--index"),
    *("--name", "--no-extra", "--no-group", "--only-group", "--package", "--prefix", "--project", "--python"),
    *("--with", "--with-editable", "--with-requirements"),
)
# Commands and modules: `uv run -m` names a module without a Python.
STARTING_PROCESSES = (
    *("accelerate", "accelerate.commands.accelerate_cli", "accelerate-launch", "accelerate.commands.launch"),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
)
ENV_TAKING_A_VALUE = ("-u", "--unset", "-C", "--chdir", "-a", "--argv0")
# What env is told that takes PYTHONPATH away; its words are joined by a NUL.
ENV_HIDING = re.compile(
    r"(?:^|\0)(PYTHONPATH=[^\0]*|-[0v]*i[0vS]*|-|--ignore-environment|(?:-u\0?|--unset[=\0])PYTHONPATH)(?:\0|$)"
)


def program_at(command: Sequence[str]) -> int:
    """Where a command names its program: behind `env` and all that env is told; of another wrapper, whose options are
    not known here, the first word that names a script, a Python, a shell or a launcher."""
    if Path(command[0]).name in WRAPPERS:
        return next((at for at in range(1, len(command)) if _is_program_at(command, at)), 0)
    rest = iter(range(1, len(command) if Path(command[0]).name == "env" else 0))
    for place in rest:
        if command[place] in ENV_TAKING_A_VALUE:
            next(rest, None)
        elif not command[place].startswith("-") and "=" not in command[place]:
            return place
    return 0


def _is_program_at(command: Sequence[str], at: int) -> bool:
    before, word = command[at - 1], command[at]
    if before in ("-m", "--module") and "uv" in map(os.path.basename, command[: at - 1]):
        return True  # the module that uv runs, whose own arguments follow
    return before not in WRAPPER_TAKING_A_VALUE and _is_program(word)


def _is_program(word: str) -> bool:
    return word.endswith(".py") or is_python(word) or Path(word).name in (*SHELLS, *STARTING_PROCESSES)


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


def skipping_option_of(program: str, arguments: Sequence[str]) -> str:
    """The same for a command: a Python itself, a script whose first line names one with options, or `env` before one
    of them, which may take PYTHONPATH away.

    Args:
        program: path of what is executed.
        arguments: those after it.
    """
    at = program_at([program, *arguments])
    if at:
        is_env = Path(program).name == "env"
        hiding = ENV_HIDING.search("\0".join(arguments[: at - 1])) if is_env else None
        again = skipping_option_of(arguments[at - 1], arguments[at:])
        return f"env {hiding[1]}".replace("\0", " ") if hiding else again
    if is_python(program):
        return skipping_option(arguments)
    words = _first_line(program)
    while words and not is_python(words[0]):
        words = words[1:]  # env, and its own options
    return skipping_option(words[1:])


def _first_line(program: str) -> list[str]:
    """The words behind a script's #!, which name its interpreter."""
    return _shebang(program)[2:].split()


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
    return any(Path(word).name in SHELLS for word in (program, *_first_line(program)))


def is_python(program: str) -> bool:
    return re.fullmatch(r"(python|pypy)[\d.]*t?", Path(program).name) is not None


def runs_python(program: str) -> bool:
    """Whether it is a Python, or a script for one."""
    return any(map(is_python, (program, *_first_line(program))))


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
