"""Gives tox one environment for each row of compat_matrix.yaml that has one, so that no second list exists.

test                  unit, distributed and contract tests and the roads on the newest DiffSynth row, but the slow ones:
                      `make slow` and CI run these in the same environment, except kit and sweep
sweeps                what is marked sweep, but for that of the newest DiffSynth row, which runs its own
diffsynth-2.0.0 ...   the contract tests of one row's framework at its version
core-torch29 ...      what does not depend on a framework, across torch, wrapt and Python
lowest                the same with the lowest release that each requirement of wanshim's own admits
matrix-ci             label: the rows that CI runs; `make matrix` runs them all, see tests/matrix.py

A row installs what compat_matrix.yaml records as its environment, and every environment the tools of
tests/constraints.txt; with `tox run --newest` both are free, and the newest of everything is tried.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tox.config.loader.memory import MemoryLoader
from tox.config.types import Command
from tox.plugin import impl

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from tests.contract.about import is_run  # noqa: E402 - the checkout's own, like the reader of the table
from wanshim.patching.verdict import Verdict  # noqa: E402
from wanshim.select.matrix import Row, load  # noqa: E402

# What every run of `make test` covers besides the newest DiffSynth's contract tests.
EVERYWHERE = ["tests/unit", "tests/distributed", "tests/contract/test_*.py", "tests/roads"]
FREE = ["tests/unit/test_*.py", "tests/unit/patching/test_*.py", "tests/unit/drift/test_*.py"]
WITHOUT_TORCH = [
    str(path.relative_to(ROOT))
    for pattern in FREE
    for path in sorted(ROOT.glob(pattern))
    if not re.search(r"(import|from) torch\b", path.read_text(encoding="utf-8"))
]
# The rest, the longest first; what needs no torch is not run again for each torch.
CORE = ["tests/distributed", "tests/unit", *(f"--ignore={path}" for path in WITHOUT_TORCH)]
KIT = "test_contract_kit.py"
TORCH = ["torch", "numpy", "safetensors"]
# A test waits for the interpreters it starts most of the time, so three files run side by side on two cores, in the
# order of their names: by number of tests the longest, of few tests, would come last.
PYTEST = ["python", "-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
QUICK = ["-m", "not slow"]
SWEEPS = "sweeps"
# name -> (what it installs, Python, tests). They stand across the rows: no framework is in them. The long sweeps run
# once on either side of torch.
CROSS_ROWS: dict[str, tuple[list[str], str, list[str]]] = {
    "python-3.10": ([], "3.10", [*QUICK, *WITHOUT_TORCH]),
    "python-3.12": ([], "3.12", [*QUICK, *WITHOUT_TORCH]),
    "python-3.13": ([], "3.13", WITHOUT_TORCH),
    "wrapt-oldest": (["wrapt==2.5.0"], "3.11", [*QUICK, *WITHOUT_TORCH]),
    "wrapt-newest": (["wrapt"], "3.11", [*QUICK, *WITHOUT_TORCH]),
    "lowest": (
        [f"wanshim[monitor] @ {ROOT.as_uri()}"],
        "3.11",
        [*QUICK, *WITHOUT_TORCH, "tests/unit/monitor", "tests/unit/training/test_progress_log.py"],
    ),
    # The interpreter of its Triton, 3.5, takes an array of one element for an int, which NumPy 2.4 no longer does.
    "core-torch29": (["torch==2.9.1", "numpy<2.4", "safetensors"], "3.11", [*QUICK, *CORE]),
    "core-newest-torch": (TORCH, "3.11", CORE),
}
# wanshim comes among the requirements, so that its own are resolved in one go with those of the tests: a second call
# would leave what the first has installed.
CONSTRAINED = {"UV_CONSTRAINT": str(ROOT / "tests" / "constraints.txt")}
SETTINGS: dict[str, dict[str, Any]] = {"lowest": {"uv_resolution": "lowest-direct"}}


@cache
def all_rows() -> tuple[Row, ...]:
    return load(ROOT / "compat_matrix.yaml").rows


def rows() -> list[Row]:
    return [row for row in all_rows() if row.tox]


def rows_of(framework: str) -> list[Row]:
    """Ascending."""
    return [row for row in rows() if row.framework == framework]


def recorded(row: Row) -> list[str]:
    """What the row's tests last passed with, as requirements."""
    own = {"python", row.framework.replace("_", "-")}
    return [f"{name}=={version}" for name, version in row.environment.items() if name not in own]


def kit_arguments(row: Row) -> list[str]:
    """The kit's thirty processes a feature run once: in the newest row that patches the feature. One that no row
    patches is patched in a source tree, and has them in its framework's newest row."""
    same = rows_of(row.framework)
    elsewhere = [f"{row.framework}.{ability}" for ability in row.cells if _newest_with(ability, same) != row]
    kit = f"{_contract(row)}/{KIT}"
    if len(elsewhere) == len(row.cells):
        return [f"--ignore={kit}"]
    return [f"--deselect={kit}::test_contract[{feature}-" for feature in elsewhere]


def _newest_with(ability: str, same: list[Row]) -> Row:
    patched = [row for row in same if ability in row.cells and row.cells[ability].verdict is Verdict.PATCH]
    return patched[-1] if patched else same[-1]


def unclaimed_arguments(row: Row) -> list[str]:
    files = sorted((ROOT / _contract(row)).glob("test_*.py"))
    same = [other for other in all_rows() if other.framework == row.framework]
    unclaimed = [file for file in files if not is_run(file.stem, row.cells, same)]
    return [f"--ignore={file.relative_to(ROOT)}" for file in unclaimed]


def sweep_arguments(row: Row) -> list[str]:
    """What is slow runs in a framework's newest row; in each, what users type, and what proves a cell of its own."""
    return [] if row == rows_of(row.framework)[-1] else ["-m", "not slow or kit or road or proof"]


@impl
def tox_add_option(parser: Any) -> None:
    parser.add_argument("--newest", action="store_true", help="the newest of what a row and the tools depend on")


@impl
def tox_extend_envs() -> Iterator[str]:
    yield from ["test", SWEEPS, *(row.tox_environment for row in rows()), *CROSS_ROWS]


@impl
def tox_add_core_config(core_conf: Any, state: Any) -> None:
    newest = rows_of("diffsynth")[-1]
    title = "what every change must pass"
    # On whatever Python runs it; a row's tests are held to the Python that the row names.
    quick = [*QUICK, *_files(EVERYWHERE), _contract(newest)]
    _add(state, "test", newest.install, quick, title, row=newest)
    long = ["-m", "sweep", *_files(EVERYWHERE)]
    _add(state, SWEEPS, newest.install, long, "the sweeps outside the contract tests", (), newest, newest.python)
    for row in rows():
        labels = ["matrix-ci"] * (row.ci and row != newest) + ["newest"] * (row == rows_of(row.framework)[-1])
        paths = [_contract(row), *kit_arguments(row), *unclaimed_arguments(row), *sweep_arguments(row)]
        _add(state, row.tox_environment, row.install, paths, f"{row.framework} {row.version}", labels, row, row.python)
    for name, (install, python, paths) in CROSS_ROWS.items():
        labels = ["newest"] if name.endswith(("newest", "newest-torch")) else []
        _add(state, name, install, paths, "without a framework", labels, python=python)


def _files(patterns: list[str]) -> list[str]:
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def _contract(row: Row) -> str:
    return f"tests/contract/{row.framework}"


def _overrides(row: Row) -> dict[str, str]:
    """Requirements that a framework's contract tests put in place of its own, such as a kernel that needs
    CUDA."""
    path = ROOT / _contract(row) / "overrides.txt"
    return {"UV_OVERRIDE": str(path)} if path.is_file() else {}


def _add(
    state: Any,
    name: str,
    install: Sequence[str],
    paths: list[str],
    description: str,
    labels: Sequence[str] = (),
    row: Row | None = None,
    python: str = "",
) -> None:
    newest = state.conf.options.newest
    pins = recorded(row) if row is not None and not newest else []
    loader = MemoryLoader(
        description=description,
        deps=[*install, *pins],
        commands=[Command([*PYTEST, *paths, *(state.conf.pos_args(None) or ())])],
        labels=list(labels),
        pass_env=["WANSHIM_TEST_FASTVIDEO_TREE", "DIFFSYNTH_CHECKOUT"],  # checkouts that some tests look at
        set_env={
            "PYTHONPATH": str(ROOT),  # for the programs that tests start elsewhere
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "UV_COMPILE_BYTECODE": "1",  # or the first processes, side by side, compile the same modules
            "OMP_NUM_THREADS": "1",  # tiny tensors gain nothing by threads, and processes share the cores
            "WANSHIM_TEST_ROW": f"{row.framework} {row.version}" if row is not None else name,
            **(_overrides(row) if row is not None else {}),
            **({} if newest else CONSTRAINED),
        },
        **({"base_python": [f"python{python}"]} if python else {}),
        **SETTINGS.get(name, {}),
    )
    state.conf.memory_seed_loaders[name].append(loader)
