"""One rank of a data-parallel training job; run by test_split_ddp.py as `python -m`, once a rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import wanshim


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if os.environ.get("WANSHIM_DEVICES"):
        wanshim.activate("diffsynth.model_split")
    from accelerate import Accelerator
    from diffsynth.diffusion import runner

    from tests.contract.diffsynth.test_split_training_lanes import Logger, Samples, Training

    torch.manual_seed(11)
    module, accelerator = Training(), Accelerator(cpu=True, gradient_accumulation_steps=int(os.environ["ACCUMULATION"]))
    if accelerator.process_index == 1 and os.environ.get("FAULT"):
        module.fault = 1
    runner.launch_training_task(
        accelerator, Samples(), module, Logger(folder), learning_rate=1e-2, num_workers=0, num_epochs=1
    )
    notes = wanshim.report().row("diffsynth.model_split").notes if os.environ.get("WANSHIM_DEVICES") else ()
    said = {"seen": module.seen, "notes": list(notes), "bypass": os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP")}
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
