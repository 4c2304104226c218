"""Whether the ETA at half-way was right: real DiffSynth jobs by the machine's own clock.

    python benchmarks/progress_eta.py [--seconds 1.0] [--output FILE.json]

Three jobs of a tiny model, accumulation 3 over two epochs of 7 micro-batches that neither samples nor groups
divide: two processes on gloo, one process with a split model, two processes with a split model each. Each step
reads its sample for `--seconds`. Compared with the ETA after half of the steps: the seconds to the end of the log,
and, as peer, what a mean over all steps so far would have said.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import checkout  # noqa: E402

from tests.contract.diffsynth import jobs  # noqa: E402 - after the checkout is importable
from wanshim.core.training.progress_log import run_folder  # noqa: E402

JOBS: dict[str, dict[str, Any]] = {
    "two processes": {"processes": 2, "samples": 13},
    "split": {"processes": 1, "samples": 7, "variables": {"WANSHIM_DEVICES": "cpu,cpu"}},
    "two processes, each split": {"processes": 2, "samples": 13, "options": ["--split"]},
}


def measure(checkpoint: Path, folder: Path, seconds: float, job: dict[str, Any]) -> dict[str, Any]:
    variables = job.get("variables", {})
    options = ["--samples", str(job["samples"]), "--epochs", "2", "--accumulation", "3", "--seconds", str(seconds)]
    done = jobs.run(
        checkpoint, folder / "out", folder / "logs", *options, *job.get("options", []),
        processes=job["processes"], variables=variables,
        features="diffsynth.progress" + (",diffsynth.model_split" if variables else ""),
    )  # fmt: skip
    run = run_folder(folder / "logs", folder / "out")
    accounting = json.loads((run / "run.json").read_text())["accounting"]
    eta, took = jobs.eta_at_half(run)
    return {
        "steps": f"{done[0]['micro']} of {accounting['micro_steps']}",
        "optimizer_steps": f"{done[0]['optimizer']} of {accounting['optimizer_steps']}",
        "eta_at_half_s": round(eta, 2),
        "took_s": round(took, 2),
        "ratio": round(eta / took, 3),
        "ratio_of_a_mean": round(jobs.mean_eta_at_half(run) / took, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write = f"from wanshim.demo import wan_checkpoint as w; from pathlib import Path; w.write(Path({name!r}) / 'c')"
        subprocess.run([sys.executable, "-c", write], cwd=ROOT, check=True)
        for title, job in JOBS.items():
            result[title] = measure(folder / "c", folder / title.replace(" ", "-"), args.seconds, job)
            print(f"{title}: {result[title]}", flush=True)
    load = f"load average {os.getloadavg()[0]:.0f}"
    result |= {"diffsynth": version("diffsynth"), "torch": version("torch"), "gpu": None}
    result |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores, {load}", **checkout.state()}
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
