"""Says, when a command of `wanshim run` has ended, that wanshim was in none of its processes.

The command takes the place of `wanshim run`, so a process beside it waits for its end. Of a command that is no Python
itself alone: a Python says what it lacks, but not if a script has replaced PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from wanshim import settings
from wanshim.process_report import say

UNREACHED = (
    "no Python process of this command has said that wanshim is in it. In a script, write "
    "export PYTHONPATH=YOURS:$PYTHONPATH; sudo, ssh and containers drop the variable"
)
STARTING_ELSEWHERE = ("bsub", "mpiexec", "mpirun", "qsub", "salloc", "sbatch", "srun")  # or later


def watch(program: str, variables: dict[str, str]) -> Path | None:
    """Start it for the program that this process becomes.

    Args:
        program: its file.
        variables: of the program; the file that its processes say in that wanshim is there is added.

    Returns:
        The folder of that file, for whoever starts no program after all to remove; None: nothing is watched.
    """
    elsewhere = Path(program).name in STARTING_ELSEWHERE
    if (
        elsewhere or settings.RUN_LAUNCHER in variables or os.getpid() == 1
    ):  # a launcher looks itself; with PID 1 all end
        return None
    folder = None
    try:
        program_ends = os.pidfd_open(os.getpid())
        folder = Path(tempfile.mkdtemp(prefix="wanshim-run-"))
        folder.chmod(0o1733)  # for the processes of another user, too; nobody else knows the name
        child = os.fork()
    except (AttributeError, OSError):  # before Linux 5.3; a full disk; as many processes as there may be
        if folder is not None:
            folder.rmdir()
        return None
    if child == 0:
        try:
            os.setsid()  # Ctrl+C is for the program
            if os.fork() == 0:  # no child of the program, which may wait for all that it has
                for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                select.select([_release_all_but(program_ends)], [], [])
                _say_if_unreached(folder)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(program_ends)
    variables[settings.RUN_FAILURE] = str(folder / "0")
    return folder


def _release_all_but(file: int) -> int:
    """Nothing but standard error and `file`, whose number is another then: whoever reads the program's output waits for
    its last writer."""
    kept = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number not in (0, 1, 2, kept):
            with suppress(OSError):  # that of the listing itself
                os.close(number)
    return kept


def _say_if_unreached(folder: Path) -> None:
    """Nothing where part of the command goes on, as a daemon does: wanshim may still come into it."""
    failure = folder / "0"
    goes_on = _is_anywhere(f"{settings.RUN_FAILURE}={failure}".encode())  # before the file: one may end in between
    is_unreached = folder.exists() and not goes_on and not settings.reached_file(failure).exists()
    shutil.rmtree(folder, ignore_errors=True)
    if is_unreached:
        with suppress(OSError):  # nobody reads it any more
            say(UNREACHED)


def _is_anywhere(variable: bytes) -> bool:
    """Whether a process has it in its environment."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if variable in file.read_bytes().split(b"\0"):
                return True
    return False
