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
from dataclasses import replace
from typing import Any

from wanshim.testing import checks
from wanshim.testing.contract import Contract
from wanshim.testing.inspection import differences, feature, namespaces, resolve
from wanshim.testing.originals import Originals


def main(data: dict[str, Any], names: list[str]) -> None:
    tuples: dict[str, Any] = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    contract = Contract(**{**data, **tuples})
    for name in contract.preload:
        _import(name)
    imports, rebinds = _plain_call(contract)
    contract = replace(contract, rebinds=(*contract.rebinds, *rebinds))
    for name in imports:
        _import(name)
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


def _import(name: str) -> None:
    with contextlib.suppress(Exception):  # a module that only the framework can import comes with it, later
        importlib.import_module(name)


def _plain_call(contract: Contract) -> tuple[list[str], list[str]]:
    """What the import and a call without wanshim bring in, but for the framework itself, wanshim and the tests;
    and the names they bind anew once a module has run. Asked of a fork."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        found: tuple[list[str], list[str]] = ([], [])
        with contextlib.suppress(BaseException):
            found = _call_plainly(contract)
        with os.fdopen(writer, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        imports, rebinds = json.loads(pipe.read() or "[[], []]")
    os.waitpid(process, 0)
    return imports, rebinds


def _call_plainly(contract: Contract) -> tuple[list[str], list[str]]:
    before, own = set(sys.modules), (contract.feature.split(".")[0], "wanshim", contract.call.split(".")[0])
    originals = Originals(feature(contract.feature))
    checks.import_framework(contract)
    with contextlib.suppress(Exception):  # a feature that mends what is broken has an error without it
        resolve(contract.call)()
    imports = [name for name in sys.modules if name not in before and name.split(".")[0] not in own]
    return imports, differences(originals.kept, namespaces(feature(contract.feature)))


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
