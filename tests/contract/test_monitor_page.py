"""The page in a real Chromium, beside processes that record as a trainer's do, and over logs made in a moment.

Beside a live DiffSynth job: tests/contract/diffsynth/test_monitor_live.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.page import curve, ink, open_page, row_of, wait_for_points, wait_until_read
from tests.unit.monitor.logs import make_run, start_line, steps, write_log


@pytest.fixture
def live(logs: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks of a run of 20,000 steps of 50 ms; rank 0 makes a step when rank 1 has, as under DDP."""
    command = [sys.executable, "-m", "tests.unit.training.recorded_run", str(logs)]
    lead = subprocess.Popen([*command, "1", "2", "20000", "0.05", "live", "lead"], stdout=subprocess.PIPE)
    follow = subprocess.Popen([*command, "0", "2", "20000", "0", "live", "follow"], stdin=lead.stdout)
    yield [follow, lead]
    for job in (follow, lead):
        job.kill()
        job.wait()


def test_curve_grows_and_a_killed_rank_shows_as_gone(
    browser: Any, url: str, live: list[subprocess.Popen[bytes]]
) -> None:
    page = open_page(browser, url)
    first = wait_for_points(page, 5)
    assert wait_for_points(page, first + 20) > first + 20
    assert ink(page) > 500
    page.wait_for_selector(".state[data-state=running]")
    assert re.fullmatch(r"\d+ / 20000", page.inner_text("[data-figure=step]"))
    live[1].kill()
    live[1].wait()
    row_of(page, 1).locator("td[data-state=gone]").wait_for()
    page.wait_for_selector(".run .state[data-state=gone]")
    assert f"process {live[1].pid}" in page.inner_text(".problems")
    assert page.foreign == []
    assert page.faults == []


def test_hundred_thousand_steps_are_drawn_from_a_few_thousand_points(browser: Any, logs: Path, url: str) -> None:
    write_log(make_run(logs / "long", samples=100_000), [start_line(), *steps(100_000)])
    wait_until_read(url, 100_000)
    page = open_page(browser, url)
    page.wait_for_selector("[data-drawn=yes]")
    assert page.evaluate("() => [...cards.values()][0].history.curve.x.at(-1)") == 100_000
    assert page.inner_text("[data-figure=step]") == "100000 / 100000"
    assert 500 < len(curve(page)["x"]) < 3000
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
