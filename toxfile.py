"""Gives tox one environment for each row of compat_matrix.yaml that has one, so that no second list exists.

test                  unit, distributed and contract tests on the newest DiffSynth row
diffsynth-2.0.0 ...   the contract tests of one row's framework at its version
matrix-ci, matrix-all  labels: the rows that CI runs, and all of them
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tox.config.loader.memory import MemoryLoader
from tox.config.types import Command
from tox.plugin import impl

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from wanshim.matrix import Row, load  # noqa: E402 - the checkout's own reader of the table

# What every run of `make test` covers besides the newest DiffSynth's contract tests.
EVERYWHERE = ["tests/unit", "tests/distributed", "tests/contract/test_*.py"]


def rows() -> list[Row]:
    return [row for row in load(ROOT / "compat_matrix.yaml").rows if row.tox]


def newest_diffsynth() -> Row:
    return [row for row in rows() if row.framework == "diffsynth"][-1]


@impl
def tox_extend_envs() -> Iterator[str]:
    yield from ["test", *(row.tox_environment for row in rows())]


@impl
def tox_add_core_config(core_conf: Any, state: Any) -> None:
    newest = newest_diffsynth()
    everywhere = [str(path.relative_to(ROOT)) for pattern in EVERYWHERE for path in sorted(ROOT.glob(pattern))]
    _add(state, "test", newest, [*everywhere, _contract(newest)], "what every change must pass", [])
    for row in rows():
        labels = ["matrix-all", *(["matrix-ci"] if row.ci and row is not newest else [])]
        _add(state, row.tox_environment, row, [_contract(row)], f"{row.framework} {row.version}", labels)


def _contract(row: Row) -> str:
    return f"tests/contract/{row.framework}"


def _add(state: Any, name: str, row: Row, paths: list[str], description: str, labels: list[str]) -> None:
    loader = MemoryLoader(
        description=description,
        deps=list(row.install),
        commands=[Command(["python", "-m", "pytest", *paths, *(state.conf.pos_args(None) or ())])],
        labels=labels,
        set_env={
            "PYTHONPATH": "{tox_root}",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "WANSHIM_TEST_ROW": f"{row.framework} {row.version}",
        },
    )
    state.conf.memory_seed_loaders[name].append(loader)
