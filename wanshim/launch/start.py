"""`wanshim run`: a program, and every Python process it starts, with wanshim active."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from wanshim import hand_over, settings
from wanshim.launch import ranks
from wanshim.launch.interpreter_options import is_python, not_found, skipping_option
from wanshim.launch.ranks import BOOT
from wanshim.process_report import say


def environment(
    features: str | None = None,
    *,
    report: bool = False,
    gpus: int | None = None,
    generate: int | None = None,
    fast: bool = False,
) -> dict[str, str]:
    """The variables that make every Python child activate wanshim: our folder first on PYTHONPATH.

    Args:
        features: WANSHIM_FEATURES for it; None leaves the environment's.
        report: each process that was patched says on standard error at its end what ran.
        gpus: that the training is planned for; 1: one process, by a plan for one GPU; None: it is not asked for here.
        generate: over how many GPUs the pipeline of one process goes.
        fast: sets WANSHIM_FAST: all that is faster and changes bits.
    """
    result = dict(os.environ)
    # An empty part means the current folder: it is kept, unless the whole variable is empty.
    rest = result["PYTHONPATH"].split(os.pathsep) if result.get("PYTHONPATH") else []
    result["PYTHONPATH"] = os.pathsep.join([str(BOOT), *(part for part in rest if part != str(BOOT))])
    result[hand_over.RUN_PREFIX] = sys.prefix
    result.pop(hand_over.INHERITED, None)  # a run of its own, whatever started it
    if features is not None:
        result["WANSHIM_FEATURES"] = features
    if report:
        result.setdefault("WANSHIM_REPORT", "1")
    asked: dict[str, tuple[str, str]] = {}  # the value and its option, by variable
    if gpus is not None:
        plan = result.get(settings.PLAN)
        if not plan or settings.is_off(plan):
            plan = plan_of(gpus)
            asked[settings.PLAN] = plan, f"--gpus {gpus}"
        if gpus == 1 and plan == "auto":
            asked[settings.DEVICES] = "cuda:0", "--gpus 1"  # else a plan for all that are in sight
    if fast:
        asked[settings.FAST] = "1", "--fast"
    if generate is not None:
        asked[settings.GENERATE] = str(generate), f"--gpus {generate}"
    if asked:
        lines = (f"{option}\t{name}={value}" for name, (value, option) in asked.items())
        result[hand_over.RUN_OPTIONS] = "\n".join(lines)
    return result | {name: value for name, (value, _) in asked.items()}


def plan_of(gpus: int) -> str:
    """The plan of a process for each of so many GPUs: each sample over all of them, or what fits the one best."""
    return "sequence" if gpus > 1 else "auto"


def look_beside(command: Sequence[str]) -> None:
    """Have this process find the frameworks that the command's program will find: Python puts the folder of a script
    first on sys.path, or the current one."""
    # os.path: Path.is_file raises for a word that is too long for a path, as a text for sh -c
    script = next((word for word in command if word.endswith(".py") and os.path.isfile(word)), None)  # noqa: PTH113
    if not getattr(sys.flags, "safe_path", False) and (script or (command and is_python(command[0]))):
        sys.path.insert(0, str(Path(script).resolve().parent) if script else "")


def resolve(command: list[str]) -> tuple[list[str], str]:
    """The command, behind this Python where it is a `.py` file, and the path of its program.

    Raises:
        WanshimError: there is no such program; the message says why.
    """
    command = [sys.executable, *command] if command[0].endswith(".py") else command
    program = shutil.which(command[0])
    if program is None:
        raise not_found(command[0])
    return command, program


def run(command: list[str], variables: dict[str, str], *, processes: int = 1, watched: bool = True) -> int:
    """Run `command` in a process, or in one for each rank, until it has ended. A `.py` file is run by this Python.

    Args:
        command: program and arguments, as without wanshim.
        variables: of these processes, from `environment`.
        processes: how many train together, one for each GPU.
        watched: False: nothing is said at the end of a command that wanshim did not come into.

    Returns:
        The exit status of these processes.

    Raises:
        WanshimError: there is no such program, or it cannot be executed; the message says why.
    """
    command, program = resolve(command)
    option = skipping_option(command[1:]) if is_python(program) else ""
    if option:
        say(f"{option} makes Python pass over wanshim: {program} runs without it")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller
            stream.flush()
    if processes > 1:
        return ranks.run(command, processes, variables)
    return ranks.run_alone(command, variables, watched=watched and not option)
