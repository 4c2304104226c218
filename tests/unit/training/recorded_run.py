"""A process that records a run as a trainer would, without one: `python -m ... FOLDER RANK PROCESSES STEPS SECONDS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from wanshim.core.training.accounting import StepAccounting
from wanshim.core.training.recorder import RunRecorder, TrainingRun


def main(folder: str, rank: str, processes: str, steps: str, seconds: str, output: str = "run") -> None:
    accounting = StepAccounting(int(steps) * int(processes), processes=int(processes))
    run = TrainingRun(output, "test 1.0", output, accounting)
    recorder = RunRecorder(Path(folder), run, int(rank), [f"cpu:{rank}"])
    for step in range(int(steps)):
        recorder.begin_step(0, 1e-4)
        if float(seconds):
            time.sleep(float(seconds))
        recorder.end_step(1.0 / (1 + step), steps_optimizer=True)
    recorder.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
