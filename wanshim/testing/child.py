"""`python -m wanshim.testing.child`: runs checks, each in a fork of this process.

What the framework itself imports, such as torch, is imported once and shared by the forks. The framework and
wanshim's state are fresh in each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from typing import Any

from wanshim.testing import checks
from wanshim.testing.contract import Contract


def main(data: dict[str, Any], names: list[str]) -> None:
    contract = Contract(**{**data, "modules": tuple(data["modules"]), "preload": tuple(data["preload"])})
    for name in (*contract.preload, *_imported_by_the_framework(contract)):
        with contextlib.suppress(Exception):  # a module that only the framework can import comes with it, later
            importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    sys.stdout.flush()
    for name in names:
        process = os.fork()
        if not process:
            _run_and_leave(name, contract)
        _, status = os.waitpid(process, 0)
        if status:
            _say(name, f"the process died with status {status}")


def _imported_by_the_framework(contract: Contract) -> list[str]:
    """What importing it brings in, but for the framework itself, wanshim and the tests: asked of a fork."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        before, own = set(sys.modules), (contract.feature.split(".")[0], "wanshim", contract.call.split(".")[0])
        with contextlib.suppress(BaseException):
            checks.import_framework(contract)
        names = [n for n in sys.modules if n not in before and n.split(".")[0] not in own]
        with os.fdopen(writer, "w") as pipe:
            json.dump(names, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        names = json.loads(pipe.read() or "[]")
    os.waitpid(process, 0)
    return list(names)


def _run_and_leave(name: str, contract: Contract) -> None:
    found = ""
    try:
        checks.run_check(name, contract)
    except checks.CheckFailed as failed:
        found = str(failed)
    except BaseException:
        found = traceback.format_exc()
    _say(name, found)
    os._exit(0)


def _say(name: str, found: str) -> None:
    """One line a check on file descriptor 3; standard output belongs to the framework."""
    os.write(3, (json.dumps([name, found]) + "\n").encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
