"""How long the page of `wanshim monitor` takes to show a run of 100,000 steps, in a real Chromium.

    python benchmarks/monitor_page.py [--steps 100000] [--repeat 5] [--output FILE.json]

From the request to the drawn curves, the server having read the log before; and the server's reading itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import checkout  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402 - after the checkout is importable

from tests.contract.page import CHROMIUM, FLAGS  # noqa: E402
from tests.unit.monitor.logs import make_run, start_line, steps, write_log  # noqa: E402

PORT = 17010


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_log(make_run(Path(folder) / "long", samples=args.steps), [start_line(), *steps(args.steps)])
        server = subprocess.Popen([sys.executable, "-m", "wanshim", "monitor", folder, "--serve", "--port", str(PORT)])
        try:
            result = measure(f"http://127.0.0.1:{PORT}/", args.steps, args.repeat)
        finally:
            server.kill()
            server.wait()
    load = f"load average {os.getloadavg()[0]:.0f}"
    result |= {"steps": args.steps, "machine": f"{platform.machine()}, {os.cpu_count()} cores, {load}"}
    result |= {**checkout.state(), "gpu": None}
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(url: str, count: int, repeat: int) -> dict[str, Any]:
    while read_so_far(url) < count:
        time.sleep(0.1)
    seconds = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for _ in range(repeat):
            page = browser.new_page()
            begin = time.perf_counter()
            page.goto(url)
            page.wait_for_selector("[data-drawn=yes]")
            seconds.append(time.perf_counter() - begin)
            page.close()
        browser.close()
    return {"median_s": round(statistics.median(seconds), 3), "all_s": [round(s, 3) for s in seconds]}


def read_so_far(url: str) -> int:
    try:
        runs = json.load(urllib.request.urlopen(url + "api/runs", timeout=10))["runs"]
    except OSError:
        return 0
    return int(runs[0]["current_step"]) if runs else 0


if __name__ == "__main__":
    main()
