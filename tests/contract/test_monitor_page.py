"""The page in a real Chromium, beside processes that record as a trainer's do, and over logs made in a moment.

Beside a live DiffSynth job: tests/contract/diffsynth/test_monitor_live.py.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.page import curve, ink, open_page, row_of, wait_for_points, wait_until, wait_until_read
from tests.unit.monitor.logs import make_run, start_line, steps, write_log

slow = pytest.mark.slow  # each opens a page of its own; `make test` has what a user meets first


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


@pytest.mark.slow
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


@slow
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


USED = {"memory": 22 * 2**30, "memory_total": 2**35, "utilisation": 97}


def test_several_runs_fit_a_phone_and_stand_side_by_side_on_a_wide_screen(browser: Any, logs: Path, url: str) -> None:
    for name in ("one", "two"):
        write_log(make_run(logs / name), [start_line(), *steps(50, **USED)])
    page = open_page(browser, url, viewport={"width": 360, "height": 740})
    page.wait_for_function("() => document.querySelectorAll('[data-drawn=yes]').length === 2")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    assert page.evaluate("() => [...document.querySelectorAll('.scroll')].every((e) => e.scrollWidth <= e.clientWidth)")
    lefts = page.evaluate("() => [...document.querySelectorAll('.run')].map((run) => run.getBoundingClientRect().left)")
    assert lefts[0] == lefts[1]  # one below the other
    page.set_viewport_size({"width": 1200, "height": 800})
    lefts = page.evaluate("() => [...document.querySelectorAll('.run')].map((run) => run.getBoundingClientRect().left)")
    assert lefts[0] != lefts[1]  # side by side


@slow
def test_later_status_changes_the_table_of_devices_and_no_legend(browser: Any, logs: Path, url: str) -> None:
    folder = make_run(logs / "run", processes=2, samples=200)
    write_log(folder, [start_line(0, "cuda:0"), *steps(50, **USED)], 0, "cuda:0")
    log = write_log(folder, [start_line(1, "cuda:1", gpu_absent="no NVML"), *steps(49, **USED)], 1, "cuda:1")
    page = open_page(browser, url)
    page.wait_for_selector("[data-drawn=yes]")
    with log.open("a") as file:
        file.write(json.dumps(list(steps(50, **USED))[-1]) + "\n")
    row_of(page, 1).locator("td:text-is('50')").wait_for()
    assert row_of(page, 1).inner_text().split("\t") == ["1", "cuda:1", "running", "50", "22.0 / 32", "97 %"]
    labels = page.locator("section:has([data-chart=memory]) .u-label").all_inner_texts()
    assert labels[-2:] == ["rank 0 cuda:0", "rank 1 cuda:1"]
    assert page.inner_text(".absent") == "rank 1 cuda:1: no NVML"


@pytest.mark.slow
def test_resumed_attempt_replaces_points_and_is_marked(browser: Any, logs: Path, url: str) -> None:
    log = write_log(make_run(logs / "run"), [start_line(), *steps(40)])
    page = open_page(browser, url)
    wait_for_points(page, 39)
    before = ink(page)
    write_log(log.parent, [start_line(done=30), *list(steps(35))[30:]])
    page.wait_for_function("() => [...cards.values()][0].history.resumed_at.length === 1")
    assert page.evaluate("() => [...cards.values()][0].history.resumed_at") == [30]
    wait_until(lambda: curve(page)["x"] == list(range(1, 36)), "the points that are trained again were not replaced")
    assert ink(page) != before
    assert "resumed at step 30" in page.inner_text(".where")
    assert page.faults == []


@slow
def test_empty_folder_says_so_and_shows_the_run_that_starts(browser: Any, logs: Path, url: str) -> None:
    page = open_page(browser, url)
    page.wait_for_selector("#empty:not([hidden])")
    write_log(make_run(logs / "new"), [start_line()])
    page.wait_for_selector(".run .state[data-state=starting]")
    assert page.locator("#empty").is_hidden()
    assert page.locator("section:not([hidden])").count() == 0  # no empty charts
    assert page.faults == []


def believable(count: int, total_memory: float, seed: int) -> Iterator[dict[str, Any]]:
    """Steps as a training has them: a noisy loss that falls, a slow first step."""
    noise = random.Random(seed)
    for record in steps(count, seconds=2.1):
        loss = 0.08 + 0.25 * math.exp(-4 * record["step"] / count) * (1 + 0.3 * noise.gauss(0, 1))
        seconds = 44.0 if record["step"] == 1 else 2.1 + abs(noise.gauss(0, 0.05))
        memory = int((total_memory + 0.2 * noise.random()) * 2**30)
        used = {"memory": memory, "memory_total": 2**35, "utilisation": min(100, int(noise.gauss(97, 1.5)))}
        yield {**record, "loss": loss + noise.gauss(0, 0.01), "seconds": seconds, **used}


@slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_legible(browser: Any, logs: Path, url: str, scheme: str, tmp_path: Path) -> None:
    """With SCREENSHOTS naming a folder, the pictures of the documents are written there."""
    folder = make_run(logs / "run", 2, 5000, name="ti2v-5b-lora", framework="diffsynth 2.1.12")
    for rank in range(2):
        begin = start_line(rank, f"cuda:{rank}", t=time.time() - 3200)
        write_log(folder, [begin, *believable(1480, 22.1 + rank, rank)], rank, f"cuda:{rank}")
    page = open_page(browser, url, color_scheme=scheme, viewport={"width": 720, "height": 1000})
    page.wait_for_selector("[data-drawn=yes]")
    back, text = page.evaluate(
        "() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    luminance = [sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 765 for colour in (back, text)]
    assert abs(luminance[0] - luminance[1]) > 0.6
    assert (luminance[0] > 0.5) == (scheme == "light")
    wait_until(lambda: ink(page) > 500, "nothing was drawn")
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"monitor_{scheme}.png", full_page=True)
    assert (folder / f"monitor_{scheme}.png").stat().st_size > 10_000


@slow
def test_points_of_a_short_run_are_not_white_on_a_dark_page(browser: Any, logs: Path, url: str) -> None:
    """uPlot fills them white, unless it is given a colour."""
    write_log(make_run(logs / "short"), [start_line(), *steps(5)])
    wait_until_read(url, 5)
    page = open_page(browser, url, color_scheme="dark")
    wait_until(lambda: ink(page) > 50, "nothing was drawn")
    white = """() => [...document.querySelectorAll("canvas")].flatMap((c) =>
        [...new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer)]
    ).filter((pixel) => pixel === 0xffffffff).length"""
    assert page.evaluate(white) == 0
