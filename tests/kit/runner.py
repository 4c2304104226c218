"""Runs a contract's checks in processes of their own and brings the results back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tests.kit.contract import Contract, Failed, Passed
from tests.kit.inspection import resolve


def check(contract: Contract, names: Iterable[str] | None = None) -> list[Passed | Failed]:
    """Run checks of a contract; default: all of them. A check that gave no answer has failed.

    Args:
        names: those of `contract.checks()`.
    """
    wanted = list(contract.checks() if names is None else names)
    found, log = _run(contract, wanted)
    return [
        Passed(name) if found.get(name) == "" else Failed(name, found.get(name, f"no answer; the log ends:\n{log}"))
        for name in wanted
    ]


def _run(contract: Contract, names: list[str]) -> tuple[dict[str, str], str]:
    with tempfile.TemporaryDirectory() as folder:
        answers, tree = Path(folder, "answers"), Path(folder, "tree")
        tree.mkdir()
        if contract.source_tree is not None:
            resolve(contract.source_tree)(tree)
        # The shell puts the answers on descriptor 3, which survives whatever a framework does to 1 and 2.
        command = ["sh", "-c", 'exec "$0" -m tests.kit.child "$1" "$2" 3>>"$3"', sys.executable]
        command += [json.dumps(asdict(contract)), json.dumps(names), str(answers)]
        try:
            result = subprocess.run(
                command,
                env=_environment(contract, tree),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=contract.timeout_s,
                check=False,
            )
            log = result.stdout
        except subprocess.TimeoutExpired:
            log = f"not done after {contract.timeout_s} s"
        lines = answers.read_text().splitlines() if answers.is_file() else []
    return dict(json.loads(line) for line in lines), log[-2000:]


def _environment(contract: Contract, tree: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    path = os.pathsep.join(filter(None, [str(tree), str(Path.cwd()), *sys.path]))
    return {**inherited, "PYTHONPATH": path, **contract.environment}
