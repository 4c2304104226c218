"""`wanshim ...` in a fork of the tests' fork server, which has imported what the command line depends on.

A program that it runs takes the fork's place, as it takes that of an interpreter which was started for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests.forking import forking


def wanshim(
    *arguments: str, folder: Path, variables: Mapping[str, str], stdin: int | str = "", timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """What `wanshim` with these arguments and no other variables prints in `folder`, and its exit status.

    Args:
        stdin: a file descriptor, or what is read from it.
    """
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        if isinstance(stdin, str):
            given.write(stdin)
            given.seek(0)
            stdin = given.fileno()
        streams = (stdin, out.fileno(), err.fileno())
        started: Any = forking().Process(target=_Command(arguments, folder, dict(variables), streams))
        started.start()
        started.join(timeout_s)
        if started.exitcode is None:
            started.kill()
            raise subprocess.TimeoutExpired(["wanshim", *arguments], timeout_s)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(["wanshim", *arguments], started.exitcode, out.read(), err.read())


class _Command:
    """What the fork does."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, variables: dict[str, str], streams: tuple[int, int, int]
    ) -> None:
        self.arguments, self.folder, self.variables, self.streams = arguments, folder, variables, streams

    def __getstate__(self) -> dict[str, Any]:  # pickled while the fork is being started
        return {**vars(self), "streams": [DupFd(number) for number in self.streams]}

    def __call__(self) -> None:
        for number, passed in enumerate(self.streams):
            os.dup2(passed.detach(), number)  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(self.variables)
        os.chdir(self.folder)
        sys.argv = ["wanshim", *self.arguments]
        sys.modules.pop("wanshim.cli.main", None)  # its consoles are those of these streams and variables
        from wanshim.cli.main import entry

        entry()
