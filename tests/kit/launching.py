"""The processes that a job starts: a spawned child, and a rank of torchrun, both under `wanshim run`."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tests.kit.contract import Contract
from wanshim.launch import start


@contextmanager
def environment_of(contract: Contract) -> Iterator[None]:
    """The variables that `wanshim run -f feature` gives, and the contract's own."""
    before = dict(os.environ)
    os.environ.update(start.environment(f"none,{contract.feature}"))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], *filter(None, sys.path)])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def in_spawned_child(contract: Contract) -> list[tuple[str, str]]:
    return _run(contract, [sys.executable], "spawn")


def in_launched_rank(contract: Contract) -> list[tuple[str, str]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    return _run(contract, torchrun, "answer")


def _run(contract: Contract, launcher: list[str], task: str) -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, "-m", "tests.kit.launching", task, json.dumps(asdict(contract)), folder]
        result = subprocess.run(command, capture_output=True, text=True, timeout=contract.timeout_s, check=False)
        answers = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
        if result.returncode:
            raise RuntimeError(f"exit status {result.returncode}: {result.stderr[-2000:]}")
    return [(state, reason) for state, reason in answers]


def answer(data: dict[str, object], folder: str) -> None:
    """Runs in the child, which never activates wanshim itself: make the call, write down the feature's state."""
    import wanshim
    from tests.kit.inspection import resolve

    resolve(str(data["call"]))()
    row = wanshim.report().row(str(data["feature"]))
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps([row.state, row.reason]))


def spawn(data: dict[str, object], folder: str) -> None:
    child = multiprocessing.get_context("spawn").Process(target=answer, args=(data, folder))
    child.start()
    child.join()
    sys.exit(child.exitcode)


if __name__ == "__main__":
    {"answer": answer, "spawn": spawn}[sys.argv[1]](json.loads(sys.argv[2]), sys.argv[3])
