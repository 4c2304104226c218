"""What saving the state of a training costs, and a start from one: the 14B Wan DiT, LoRA of rank 32, one GPU.

    python benchmarks/resume.py --json benchmarks/results/resume_1xH200.json
    python benchmarks/resume.py --tiny

Starts DiffSynth's own loop twice, as a user does (`WANSHIM_RESUME=auto wanshim run --gpus 1 -- python ...`). The first
run saves a state every `--every` steps and ends after `--steps` as on SIGTERM; the second goes on from there. Records
each step's seconds, of which steps waited for a copy or ran beside a write, the host memory and what the report
predicted, and the seconds from the start of the loop to the end of its first step, from a state and without.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import model_split
import sequence_training as base
from accelerate import Accelerator
from diffsynth.diffusion import runner

from wanshim.core.resume.writer import StateWriter
from wanshim.core.shared.gpu_memory import indexed

INTERVAL_S = 600.0  # WANSHIM_SAVE_EVERY's default
AFTER = 3  # steps of the second run
TINY = {
    "layers": 2, "dim": 96, "ffn_dim": 64, "heads": 2, "text_dim": 32, "rank": 4, "height": 32, "width": 32,
    "frames": 5,
}  # fmt: skip


class Job(base.Training):
    """Asks for the end of the run, as Slurm does, in step `at`."""

    at = 0
    begun = 0

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        self.begun += 1
        if self.begun == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(data, inputs)


class Saves:
    """When states were copied and written, by time.perf_counter."""

    def __init__(self) -> None:
        self.copies: list[tuple[float, float]] = []
        self.writes: list[tuple[float, float]] = []
        for name, found in (("write", self.copies), ("_write", self.writes)):
            setattr(StateWriter, name, self._timed(getattr(StateWriter, name), found))

    @staticmethod
    def _timed(original: Any, found: list[tuple[float, float]]) -> Any:
        def timed(*args: Any) -> None:
            begin = time.perf_counter()
            original(*args)
            found.append((begin, time.perf_counter()))

        return timed


def memory_of_process(name: str) -> int:
    """Bytes. VmRSS: now; VmHWM: at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


class Clock(base.Clock):
    """Also notes the host memory of the process when its first step has ended."""

    before_state = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self.before_state = self.before_state or memory_of_process("VmRSS")


def train(args: argparse.Namespace) -> None:
    """One of the two runs; writes what it measured to `args.part`."""
    import wanshim

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device = indexed(accelerator.device)
    dit = model_split.build(args, str(device))
    samples = base.Samples(argparse.Namespace(**{**vars(args), "repeats": args.steps + AFTER - 1}))
    module = Job(dit, device)
    module.at = 0 if args.resumed else args.steps
    clock, saves = Clock(args.output, device.type == "cuda"), Saves()
    begin = time.perf_counter()
    status = 0
    try:
        runner.launch_training_task(accelerator, samples, module, clock, args=base.options_of_script(args))
    except SystemExit as end:
        status = int(end.code or 0)
    row = wanshim.report().row("diffsynth.resume")
    found = {
        "status": status,
        # A resumed run's clock has the ends of the first run's steps, too: a state keeps a logger's attributes.
        "first_step_s": next(end for end in clock.ends if end > begin) - begin,
        "ends": clock.ends,
        "copies": saves.copies,
        "writes": saves.writes,
        "host_before_bytes": clock.before_state,
        "host_peak_bytes": memory_of_process("VmHWM"),
        "notes": list(row.notes),
        "plan": list(wanshim.report().row("diffsynth.model_split").notes),
    }
    args.part.write_text(json.dumps(found))


def start(args: argparse.Namespace, folder: Path, *, resumed: bool) -> dict[str, Any]:
    part = folder / f"{'resumed' if resumed else 'cold'}.json"
    gpus = ["--gpus", "1"] if torch.cuda.is_available() else []
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in (*TINY, "steps", "every")]
    command = [
        *(sys.executable, "-m", "wanshim", "run", *gpus, "--", sys.executable, __file__, *options),
        *("--part", part, "--output", folder / "output", *(["--resumed"] if resumed else [])),
    ]
    own = {
        "WANSHIM_RESUME": "auto",
        "WANSHIM_SAVE_EVERY": str(args.every),
        "WANSHIM_FEATURES": "all,-diffsynth.progress",
    }
    began = time.perf_counter()
    subprocess.run([str(word) for word in command], env={**os.environ, **own}, check=False)
    if not part.exists():
        raise SystemExit(f"the {part.stem} run ended before its measures were written")
    return {**json.loads(part.read_text()), "process_s": time.perf_counter() - began}


def steps_of(run: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each step after the first two, by what it waited for: a copy, a write beside it, or neither."""
    found: dict[str, list[float]] = {"saving": [], "writing": [], "others": []}
    for begin, end in list(zip(run["ends"], run["ends"][1:], strict=False))[2:]:
        kinds = [kind for kind, spans in (("saving", run["copies"]), ("writing", run["writes"]))
                 if any(first < end and last > begin for first, last in spans)]  # fmt: skip
        found[kinds[0] if kinds else "others"].append(end - begin)
    return found


def compared(cold: dict[str, Any], resumed: dict[str, Any]) -> dict[str, Any]:
    steps = steps_of(cold)
    usual = statistics.median(steps["others"])
    longer = [seconds - usual for seconds in steps["saving"]]
    beside = [seconds - usual for seconds in steps["writing"]]
    saves = max(len(longer), 1)
    return {
        "steps_s": steps,
        "copy_s": [last - first for first, last in cold["copies"]],
        "write_s": [last - first for first, last in cold["writes"]],
        "step_that_saves_longer_s": {"median": statistics.median(longer), "max": max(longer)},
        "spread_of_other_steps_s": max(steps["others"]) - min(steps["others"]),
        "share_of_ten_minutes": (sum(longer) + sum(beside)) / saves / INTERVAL_S,
        "host_memory_GiB": (cold["host_peak_bytes"] - cold["host_before_bytes"]) / 2**30,
        "predicted": next((note for note in cold["notes"] if "host memory" in note), None),
        "first_step_s": {"cold": cold["first_step_s"], "from_a_state": resumed["first_step_s"]},
        "start_longer_s": resumed["first_step_s"] - cold["first_step_s"],
        "goes_on": next((note for note in resumed["notes"] if "goes on from" in note), None),
        "plan": cold["plan"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a small model, also without a GPU")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=str, help=argparse.SUPPRESS)
    parser.add_argument("--resumed", action="store_true", help=argparse.SUPPRESS)
    model_split.add_sizes(parser, frames=17, steps=20, every=5, repeats=0)
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    if args.part is not None:
        train(args)
        return
    with tempfile.TemporaryDirectory(prefix="wanshim-resume-") as folder:
        found = compared(start(args, Path(folder), resumed=False), start(args, Path(folder), resumed=True))
    found = model_split.environment(args) | found
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
