"""The page in a real Chromium, against processes that record as a trainer's do while the test looks."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor.logs import make_run, start_line, steps, write_log

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="the extra wanshim[monitor] is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def url(logs: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "wanshim", "monitor", str(logs), "--serve", "--port", str(port)]
    server = subprocess.Popen([*command, "--stall-floor", "5"], stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/"
    try:
        _wait_for(address, server)
        yield address
    finally:
        server.kill()
        server.wait()


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@pytest.fixture
def live(logs: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks of a run of 2000 steps, 50 ms each."""
    command = [sys.executable, "-m", "tests.unit.training.recorded_run", str(logs)]
    jobs = [subprocess.Popen([*command, str(rank), "2", "2000", "0.05", "live"]) for rank in range(2)]
    yield jobs
    for job in jobs:
        job.kill()
        job.wait()


def open_page(browser: Any, url: str, **options: Any) -> Any:
    page = browser.new_page(**options)
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda m: page.faults.append(m.text) if m.type == "error" else None)
    page.foreign = []
    page.on("request", lambda r: None if r.url.startswith((url, "data:")) else page.foreign.append(r.url))
    page.goto(url)
    return page


def points(page: Any) -> int:
    """How many points the first run's loss curve has."""
    return int(page.evaluate("() => [...cards.values()][0]?.history?.curve.x?.length ?? 0"))


def wait_for_points(page: Any, least: int) -> int:
    page.wait_for_function(f"() => ([...cards.values()][0]?.history?.curve.x?.length ?? 0) > {least}", timeout=90_000)
    return points(page)


def ink(page: Any) -> int:
    """Pixels of the loss chart that are not empty."""
    script = """() => {
      const canvas = document.querySelector('[data-chart=loss] canvas');
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      let count = 0;
      for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
      return count;
    }"""
    return int(page.evaluate(script))


def test_curve_grows_and_a_killed_rank_shows_as_gone(
    browser: Any, url: str, live: list[subprocess.Popen[bytes]]
) -> None:
    page = open_page(browser, url)
    first = wait_for_points(page, 5)
    assert wait_for_points(page, first + 20) > first
    assert ink(page) > 500
    page.wait_for_selector(".state[data-state=running]")
    assert re.fullmatch(r"\d+ / 2000", page.inner_text(".figures div:nth-child(2) dd"))
    live[1].kill()
    live[1].wait()
    page.wait_for_selector("td[data-state=gone]", timeout=60_000)
    row = page.locator("tbody tr", has=page.locator("td[data-state=gone]"))
    assert row.locator("td").first.inner_text() == "1"
    assert page.inner_text(".run .state") == "gone"
    assert f"process {live[1].pid}" in page.inner_text(".problems")
    assert page.foreign == []
    assert page.faults == []


def test_hundred_thousand_steps_are_drawn_from_a_few_thousand_points(browser: Any, logs: Path, url: str) -> None:
    write_log(make_run(logs / "long", samples=100_000), [start_line(), *steps(100_000)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # the server reads what it finds while nobody looks
        runs = json.load(urllib.request.urlopen(url + "api/runs", timeout=10))["runs"]
        if runs and runs[0]["current_step"] == 100_000 and not runs[0]["unread_bytes"]:
            break
        time.sleep(0.2)
    page = open_page(browser, url)
    page.wait_for_selector("[data-drawn=yes]")
    assert page.evaluate("() => [...cards.values()][0].history.curve.x.at(-1)") == 100_000
    assert page.inner_text(".figures div:nth-child(2) dd") == "100000 / 100000"
    assert 500 < points(page) < 3000
    assert len(urllib.request.urlopen(url + "api/runs/long/history").read()) < 500_000


def test_html_in_a_name_is_shown_as_text(browser: Any, logs: Path, url: str) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    folder = make_run(logs / "a<b>&\"'", name=evil, framework=evil)
    write_log(
        folder, [start_line(device=evil, gpu_absent=evil), *steps(3), {"event": "end", "state": evil, "error": evil}]
    )
    page = open_page(browser, url)
    page.wait_for_selector("[data-drawn=yes]")
    assert page.inner_text(".name") == evil
    assert evil in page.inner_text(".problems")
    assert page.locator("img").count() == 0
    assert page.title() == "wanshim monitor"
    assert page.faults == []


def test_page_fits_a_phone(browser: Any, logs: Path, url: str) -> None:
    for name in ("one", "two"):
        write_log(make_run(logs / name), [start_line(), *steps(50, memory=2**34, memory_total=2**35, utilisation=97)])
    page = open_page(browser, url, viewport={"width": 360, "height": 740})
    page.wait_for_function("() => document.querySelectorAll('[data-drawn=yes]').length === 2")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    lefts = page.evaluate("() => [...document.querySelectorAll('.run')].map((run) => run.getBoundingClientRect().left)")
    assert lefts[0] == lefts[1]  # one below the other
    page.set_viewport_size({"width": 1200, "height": 800})
    lefts = page.evaluate("() => [...document.querySelectorAll('.run')].map((run) => run.getBoundingClientRect().left)")
    assert lefts[0] != lefts[1]  # side by side


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_legible(browser: Any, logs: Path, url: str, scheme: str, tmp_path: Path) -> None:
    """With SCREENSHOTS naming a folder, the pictures of the documents are written there."""
    gib = 2**30
    for rank in range(2):
        for card in range(2):
            device = f"cuda:{card}"
            used = {"memory": (22 - 9 * card) * gib, "memory_total": 32 * gib, "utilisation": 97 - 3 * card}
            folder = make_run(
                logs / "ti2v-5b-lora", processes=2, samples=600, name="ti2v-5b-lora", framework="diffsynth 2.1.12"
            )
            devices = {"devices": ["cuda:0", "cuda:1"]}
            write_log(folder, [start_line(rank, device, **devices), *steps(180, seconds=2.1, **used)], rank, device)
    page = open_page(browser, url, color_scheme=scheme, viewport={"width": 720, "height": 1000})
    page.wait_for_selector("[data-drawn=yes]")
    back, text = page.evaluate(
        "() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    luminance = [sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 765 for colour in (back, text)]
    assert abs(luminance[0] - luminance[1]) > 0.6
    assert (luminance[0] > 0.5) == (scheme == "light")
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    page.wait_for_timeout(300)
    page.screenshot(path=folder / f"monitor_{scheme}.png", full_page=True)
    assert (folder / f"monitor_{scheme}.png").stat().st_size > 10_000
