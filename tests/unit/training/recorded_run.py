"""A process that records a run as a trainer would, without one.

    python -m ... FOLDER RANK PROCESSES STEPS SECONDS [OUTPUT [lead | follow]]

`lead` prints a line for each step, and `follow` makes a step for each line it reads: ranks of DDP step together,
and wait for ever when one of them is gone.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from wanshim.core.training.accounting import StepAccounting
from wanshim.core.training.recorder import RunRecorder, TrainingRun


def main(folder: str, rank: str, processes: str, steps: str, seconds: str, output: str = "run", role: str = "") -> None:
    accounting = StepAccounting(int(steps) * int(processes), processes=int(processes))
    run = TrainingRun(output, "test 1.0", output, accounting)
    recorder = RunRecorder(Path(folder), run, int(rank), [f"cpu:{rank}"])
    for step in range(int(steps)):
        if role == "follow" and not sys.stdin.readline():
            signal.pause()
        recorder.begin_step(0, 1e-4)
        if float(seconds):
            time.sleep(float(seconds))
        recorder.end_step(1.0 / (1 + step), steps_optimizer=True)
        if role == "lead":
            print(step, flush=True)
    recorder.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
