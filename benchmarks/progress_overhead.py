"""What the recording of a run costs its training thread, against a step of 100 ms.

    python benchmarks/progress_overhead.py [--steps 200] [--output FILE.json]

Each step is 100 ms of matrix products on the device, recorded and unrecorded in turn. Two figures: the time
that the training thread spends inside the recorder, and the ratio of the medians of whole steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkout
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from wanshim.core.training.recorder import RunRecorder, TrainingRun  # noqa: E402 - the checkout's own

TARGET_S = 0.1


class Work:
    """About 100 ms of matrix products; the loss stays on the device, as a trainer's does."""

    def __init__(self, device: str) -> None:
        self.device = device
        size = 4096 if device.startswith("cuda") else 384
        self.matrix = torch.randn(size, size, device=device) / size**0.5
        self.repeats = 1
        self.run()
        while (took := self._timed()) < TARGET_S * 0.9:
            self.repeats = max(self.repeats + 1, int(self.repeats * min(4.0, TARGET_S / took)))

    def run(self) -> torch.Tensor:
        result = self.matrix
        for _ in range(self.repeats):
            result = result @ self.matrix
        return result.float().mean()

    def wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def _timed(self) -> float:
        self.wait()
        begin = time.perf_counter()
        self.run()
        self.wait()
        return time.perf_counter() - begin


def measure(device: str, steps: int, folder: Path) -> dict[str, Any]:
    work = Work(device)
    recorder = RunRecorder(folder, TrainingRun("bench", "bench", "bench", None), 0, [device])
    arms: dict[str, list[float]] = {"plain": [], "recorded": []}
    inside: list[float] = []
    for _ in range(steps):
        for arm in arms:
            begin = time.perf_counter()
            if arm == "recorded":
                recorder.begin_step(0, 1e-4)
            loss = work.run()
            if arm == "recorded":
                # On the CPU the loss is ready; on a GPU the kernels still run while this returns.
                enter = time.perf_counter()
                recorder.end_step(loss, steps_optimizer=True)
                inside.append(time.perf_counter() - enter)
            work.wait()
            arms[arm].append(time.perf_counter() - begin)
    recorder.close()
    plain, recorded = (statistics.median(arms[arm]) for arm in arms)
    return {
        "steps": steps,
        "step_ms": round(1e3 * plain, 3),
        "recorded_step_ms": round(1e3 * recorded, 3),
        "ratio": round(recorded / plain, 5),
        "inside_recorder_us": {
            "median": round(1e6 * statistics.median(inside), 1),
            "p99": round(1e6 * sorted(inside)[int(0.99 * (len(inside) - 1))], 1),
        },
        "share_of_100_ms_percent": round(100 * statistics.median(inside) / TARGET_S, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        result = measure(args.device, args.steps, Path(folder))
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else None
    result |= {"gpu": gpu, "device": args.device, "machine": platform.machine(), "torch": torch.__version__}
    result |= checkout.state()
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
