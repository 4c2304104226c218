"""Runs every test that needs a GPU, one process a test file, and writes the record.

python tests/gpu_tests.py                  all of them
python tests/gpu_tests.py --jobs 4         four files at once, on the same GPUs
python tests/gpu_tests.py --workers 6      six tests of a file at once (needs pytest-xdist)
python tests/gpu_tests.py tests/gpu/split  the files below that folder
python tests/gpu_tests.py -k "2 or nccl"   the tests that pytest's expression names

The record, benchmarks/results/gpu_tests_<count>x<GPU>.json, holds each test's outcome and time, and the commit, the
GPUs, the driver and the packages it ran with; JUnit's report lies beside it. It needs pytest and DiffSynth, and neither
tox nor uv. On a machine without git, WANSHIM_COMMIT names the commit: what `python benchmarks/checkout.py` prints in
the checkout. The exit status is 1 where a test failed, and where none passed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import checkout  # noqa: E402 - the checkout's own

NEEDS_GPU = re.compile(r"mark\.gpu\(|ON_CPU_AND_GPU")
PACKAGES = ("torch", "diffsynth", "diffusers", "transformers", "accelerate", "peft", "torchao", "safetensors", "wrapt")
# Without pytest-timeout, its option of pyproject.toml is an unknown one, which --strict-config takes for an error.
OPTIONS = () if find_spec("pytest_timeout") else ("-o", "addopts=--strict-markers")


def files(paths: Sequence[Path]) -> list[Path]:
    """The test files below `paths` that hold a test for GPUs, relative to the checkout."""
    tops = [path.resolve() for path in paths]
    found = {file for top in tops for file in ([top] if top.is_file() else top.rglob("test_*.py"))}
    return sorted(file.relative_to(ROOT) for file in found if NEEDS_GPU.search(file.read_text(encoding="utf-8")))


def run(file: Path, report: Path, limit: float, options: Sequence[str]) -> list[dict[str, Any]]:
    """Run the GPU tests of one file with these options of pytest; JUnit's report goes to `report`.

    Returns:
        One entry a test: its id, outcome, seconds, and the reason of one that did not pass. A file that could not be
        collected, or did not end within `limit` seconds, is one failed entry.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *options, f"--junitxml={report}", str(file)]
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks that a test has started, too
        output = f"{process.communicate()[0]}\ndid not end within {limit:.0f} s"
    if not report.is_file():
        print(f"== {file}\n{output}", flush=True)
        return [{"test": str(file), "outcome": "error", "seconds": None, "reason": output.strip()[-500:]}]
    tests = [_entry(file, case) for case in ET.parse(report).iter("testcase")]
    counts = Counter(test["outcome"] for test in tests)
    print(f"== {file}: {_counted(counts)}", flush=True)
    if counts.keys() - {"passed", "skipped"}:
        print(output, flush=True)
    return tests


def _entry(file: Path, case: ET.Element) -> dict[str, Any]:
    odd = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    entry = {"test": f"{file}::{case.get('name')}", "outcome": "passed", "seconds": float(case.get("time", 0))}
    if odd is None:
        return entry
    outcome = {"failure": "failed"}.get(odd.tag, odd.tag)
    return entry | {"outcome": outcome, "reason": (odd.get("message") or "").partition("\n")[0]}


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "no test"


def environment() -> dict[str, Any]:
    """GPUs, driver and packages of this machine.

    Raises:
        SystemExit: there is no CUDA device.
    """
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise SystemExit(f"no test was run: torch {torch.__version__} finds no CUDA device here")
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(driver, capture_output=True, text=True, check=False).stdout.split()
    return {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": count,
        "driver": told[0] if told else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def write(folder: Path, record: dict[str, Any], reports: Sequence[Path]) -> Path:
    """Write record and JUnit's report, without this machine's name and folders."""
    gpu = "-".join(record["gpu"].removeprefix("NVIDIA ").split())
    path = folder / f"gpu_tests_{record['gpus']}x{gpu}.json"
    suites = ET.Element("testsuites")
    for report in reports:
        for suite in ET.parse(report).iter("testsuite"):
            suite.attrib.pop("hostname", None)
            suites.append(suite)
    folder.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suites).write(path.with_suffix(".xml"), encoding="utf-8", xml_declaration=True)
    path.write_text(json.dumps(record | {"junit": path.with_suffix(".xml").name}, indent=1) + "\n", encoding="utf-8")
    for written in (path, path.with_suffix(".xml")):
        written.write_text(written.read_text(encoding="utf-8").replace(f"{ROOT}/", ""), encoding="utf-8")
    return path


def verdict(tests: Sequence[dict[str, Any]]) -> int:
    """The exit status; says why it is not 0."""
    counts = Counter(test["outcome"] for test in tests)
    print(_counted(counts))
    if not counts["passed"]:
        print("failed: no test passed, so nothing is shown on these GPUs")
        return 1
    return int(bool(counts.keys() - {"passed", "skipped"}))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "tests"])
    parser.add_argument("-k", dest="names", default="", help="pytest's expression; default: every test")
    parser.add_argument("--jobs", type=int, default=1, help="test files at once")
    parser.add_argument("--workers", type=int, help="tests of one file at once")
    parser.add_argument("--limit", type=float, default=540, help="seconds for one test file")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the record")
    args = parser.parse_args(arguments)
    about = environment() | checkout.state()
    if about["commit"] is None:
        raise SystemExit(f"no test was run: {ROOT} is no git checkout; set WANSHIM_COMMIT")
    chosen = files(args.paths)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        reports = [Path(folder) / f"{i}.xml" for i in range(len(chosen))]
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        options = [*OPTIONS, "-k", args.names, *(["-n", str(args.workers)] if args.workers else [])]
        ran = list(pool.map(run, chosen, reports, repeat(args.limit), repeat(options)))
        tests = [test for of_file in ran for test in of_file]
        record = {
            "what": f"tests that need a GPU, {args.jobs} test file(s) at once",
            "command": shlex.join(["python", "tests/gpu_tests.py", *arguments]),
            "date": date,
            **about,
            "outcomes": dict(sorted(Counter(test["outcome"] for test in tests).items())),
            "tests": tests,
        }
        print(write(args.out, record, [report for report in reports if report.is_file()]))
    return verdict(tests)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
