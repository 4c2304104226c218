"""`python -m tests.kit.child`: runs checks, those of FRESH in an interpreter each, the others in forks.

What the framework itself imports, such as torch, is imported once and shared by the forks; the framework is not
imported yet in each, and wanshim not activated. A fresh interpreter has nothing but wanshim and `prepare` imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import asdict, replace
from typing import Any

from tests.kit import checks
from tests.kit.contract import FRESH, Contract
from tests.kit.inspection import differences, feature, namespaces, resolve
from tests.kit.originals import Originals


def main(data: dict[str, Any], names: list[str], *, alone: bool) -> None:
    """`alone`: this process is the fresh interpreter of the one check named."""
    tuples: dict[str, Any] = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    contract = Contract(**{**data, **tuples})
    for name in contract.prepare:
        _import(name)
    if alone:
        _run_and_leave(names[0], contract)
    for name in contract.preload:
        _import(name)
    imports, rebinds = _plain_call(contract)
    contract = replace(contract, rebinds=(*contract.rebinds, *rebinds))
    for name in imports:
        _import(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    sys.stdout.flush()
    gc.freeze()  # or the collector of each fork would copy all that it shares
    for name in names:
        status = _in_an_interpreter(name, contract) if name in FRESH else _in_a_fork(name, contract)
        if status:
            _say(name, f"the process died with status {status}")


def _in_an_interpreter(name: str, contract: Contract) -> int:
    command = [sys.executable, "-m", "tests.kit.child", json.dumps(asdict(contract)), json.dumps([name]), "alone"]
    return subprocess.run(command, pass_fds=(3,), check=False).returncode


def _in_a_fork(name: str, contract: Contract) -> int:
    process = os.fork()
    if not process:
        _run_and_leave(name, contract)
    return os.waitpid(process, 0)[1]


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
    originals = Originals(feature(contract.feature))
    before, own = set(sys.modules), (contract.feature.split(".")[0], "wanshim", contract.call.split(".")[0])
    checks.import_framework(contract)
    with contextlib.suppress(Exception):  # a feature that fixes what is broken has an error without it
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
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), alone=sys.argv[3:] == ["alone"])
