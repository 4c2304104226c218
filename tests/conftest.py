"""Markers and fixtures of all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forking
from tests.contract.about import proofs
from tests.opens import count_opens  # noqa: F401, a fixture
from tests.sources import read_once
from wanshim.select.matrix import load

# The command line's consoles would keep, from their import on, the width that pytest-xdist gives its workers.
os.environ.pop("COLUMNS", None)

# A shell's job in the background, and nohup, start with these ignored, and every process that a test starts would, too.
USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL}
for number, usual in USUAL.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One fork server for all workers of pytest-xdist, which starts while they collect. What forks print would stand
    between the lines of the report: a test that runs without workers shows it."""
    printed = [os.dup(1), os.dup(2)]
    with Path(os.devnull).open("wb") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
    try:
        node.workerinput["forks"] = forking.start()
    finally:
        for number, kept in zip((1, 2), printed):
            os.dup2(kept, number)
            os.close(kept)


def pytest_configure(config: pytest.Config) -> None:
    if "forks" in getattr(config, "workerinput", {}):
        forking.share(config.workerinput["forks"])  # type: ignore[attr-defined]
    if importlib.util.find_spec("hypothesis") is not None:  # a machine with GPUs may lack it
        from hypothesis import settings

        settings.register_profile("untimed", deadline=None)  # else an example is held to 200 ms
        settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before -m chooses among them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("sweep") is not None:
            item.add_marker(pytest.mark.slow)
        marker = item.get_closest_marker("gpu")
        if marker is not None and _gpus() < marker.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} CUDA devices, {_gpus()} here"))
    for item in _proofs(items):
        item.add_marker(pytest.mark.proof)


def _proofs(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Those without which a cell of the row that runs would have no proof."""
    framework, _, version = os.environ.get("WANSHIM_TEST_ROW", "").partition(" ")
    rows = load(Path(__file__).parent.parent / "compat_matrix.yaml").rows if version else ()
    for row in rows:
        if (row.framework, row.version) == (framework, version):
            names = ((i.path.stem, getattr(i, "originalname", i.name)) for i in items)
            slow = (i.get_closest_marker("slow") is not None for i in items)
            yield from (items[at] for at in proofs(row.cells, list(zip(names, slow, strict=True))))


def pytest_collection_finish() -> None:
    # A framework leaves millions of objects, which every full collection of every test would walk through again.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _sources_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        read_once(patch)
        yield


def _gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


@pytest.fixture
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention's backward adds in any order by default: two runs of one unsplit model differ."""
    import torch

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _no_wanshim_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests start from a clean environment and leave wanshim inactive."""
    for name in [n for n in os.environ if n.startswith(("WANSHIM_", "DIFFSYNTH_DUAL", "DIFFSYNTH_DATA_PROCESS"))]:
        monkeypatch.delenv(name)
    yield
    import wanshim

    wanshim.deactivate()
