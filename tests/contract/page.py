"""The page of `wanshim monitor` in a real Chromium: server, browser, and what a test asks the page."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="the extra wanshim[monitor] is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
WAIT_S = 120.0  # a bound for a machine under load, not what anything takes


@contextmanager
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        path = CHROMIUM or driver.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium on PATH or from playwright: make chromium")
        opened = driver.chromium.launch(executable_path=path, args=FLAGS, timeout=1000 * WAIT_S)
        yield opened
        opened.close()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of `wanshim monitor FOLDER --serve`, a process of its own."""
    command = [sys.executable, "-m", "wanshim", "monitor", str(folder), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()  # said when it listens
            assert address, "the server ended"
            yield address
        finally:
            server.kill()


@contextmanager
def serving_here(folder: Path) -> Iterator[str]:
    """The address of the same server in a thread: quick to start."""
    import uvicorn

    from wanshim.monitor.runs import RunFolder
    from wanshim.monitor.server import make_app

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(RunFolder(folder)), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            wait_until(lambda: server.started, "the server did not start")
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(WAIT_S)


def wait_until(done: Callable[[], Any], otherwise: str, within_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def wait_until_read(url: str, steps: int) -> None:
    """The server reads what it finds while nobody looks; wait until its first run is at `steps`."""

    def read() -> bool:
        runs = json.load(urllib.request.urlopen(url + "api/runs", timeout=10))["runs"]
        return bool(runs) and runs[0]["current_step"] == steps and not runs[0]["unread_bytes"]

    wait_until(read, f"the server did not read {steps} steps")


def open_page(browser: Any, url: str, **options: Any) -> Any:
    """A page that keeps the errors of its script in `faults` and what it asked of other servers in `foreign`."""
    page = browser.new_page(**options)
    page.set_default_timeout(1000 * WAIT_S)
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda m: page.faults.append(m.text) if m.type == "error" else None)
    page.foreign = []
    page.on("request", lambda r: None if r.url.startswith((url, "data:")) else page.foreign.append(r.url))
    page.goto(url)
    return page


def curve(page: Any) -> dict[str, list[float | None]]:
    """The columns that the first run's loss curve is drawn from."""
    return dict(page.evaluate("() => [...cards.values()][0]?.history?.curve ?? {x: []}"))


def wait_for_points(page: Any, least: int) -> int:
    """Wait until the first run's loss curve has more than `least` points; how many it has."""
    page.wait_for_function(f"() => ([...cards.values()][0]?.history?.curve.x?.length ?? 0) > {least}")
    return len(curve(page)["x"])


def ink(page: Any) -> int:
    """Pixels of the loss chart that are not empty; 0 before there is a chart."""
    script = """() => {
      const canvas = document.querySelector('[data-chart=loss] canvas');
      if (!canvas) return 0;
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      let count = 0;
      for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
      return count;
    }"""
    return int(page.evaluate(script))


def row_of(page: Any, rank: int) -> Any:
    """The table row of a rank's first device."""
    return page.locator(f"tbody tr[data-rank='{rank}']").first
