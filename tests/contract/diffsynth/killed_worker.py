"""A training job that is killed while it writes its second file; test_split_faults.py forks it.

`write` kills it with half the file's bytes on disk, `rename` when all are there but not yet under the name.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import wanshim


def main(folder: Path, moment: str, accumulation: int) -> None:
    torch.set_num_threads(1)
    os.environ.update({"WANSHIM_DEVICES": "cpu,cpu", "ACCELERATE_USE_CPU": "true"})
    wanshim.activate("none,diffsynth.model_split")
    from accelerate.utils import other

    from tests.contract.diffsynth.training import train

    written = []
    write = other.safe_save_file

    def write_and_die(tensors: Any, path: str, **options: Any) -> None:
        write(tensors, path, **options)
        written.append(path)
        if len(written) == 2:
            if moment == "write":
                os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    other.safe_save_file = write_and_die
    train(folder, accumulation)
