"""Contract tests run the real frameworks on tiny models."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What a green run has not shown stands at its end by itself, not only among the skipped tests."""
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    count = sum("no Chromium" in reason for reason in skipped)
    if count:
        line = f"NOT TESTED: the page of `wanshim monitor`, {count} tests, as there is no Chromium: make chromium"
        terminalreporter.write_line(line, yellow=True)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and a busy machine makes them wait for each other."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for a torch that is imported later
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="module")
def _chromium() -> Iterator[Any]:
    from tests.contract import page

    with page.chromium() as opened:
        yield opened


@pytest.fixture
def browser(_chromium: Any) -> Iterator[Any]:
    """A real Chromium, without the pages of the test before."""
    yield _chromium
    for context in _chromium.contexts:
        context.close()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """The folder that `url` shows."""
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def url(logs: Path) -> Iterator[str]:
    """The address of a server over `logs`, in a thread of this process."""
    from tests.contract import page

    with page.serving_here(logs) as address:
        yield address
