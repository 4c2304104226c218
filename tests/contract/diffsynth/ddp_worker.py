"""One rank of a data-parallel training job; run as `python -m`, once a rank.

By test_split_ddp.py on the CPU, and by tests/gpu/split/test_ddp.py on GPUs (ON_GPU=1), where each sample
brings its own draws, so that any number of processes sees the same noise.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

import wanshim


def keep_first_gradients(module: torch.nn.Module, path: Path) -> None:
    """Write what the first optimizer step sees; AdamW would blow a last bit of it up to a whole step."""

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        named = module.named_parameters()
        save_file({name: p.grad.cpu() for name, p in named if p.grad is not None}, path)
        handle.remove()

    handle = register_optimizer_step_pre_hook(keep)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if os.environ.get("WANSHIM_DEVICES"):
        wanshim.activate("diffsynth.model_split")
    from accelerate import Accelerator
    from diffsynth.diffusion import runner

    from tests.contract.diffsynth.training import Logger, Samples, Training, wan_pipe

    torch.manual_seed(11)
    on_gpu = "ON_GPU" in os.environ
    torch.use_deterministic_algorithms(on_gpu)
    accelerator = Accelerator(cpu=not on_gpu, gradient_accumulation_steps=int(os.environ["ACCUMULATION"]))
    module = Training(own_draws=on_gpu, pipe=wan_pipe(str(accelerator.device)))
    if accelerator.process_index == 1 and os.environ.get("FAULT"):
        module.fault = 1
    if on_gpu and accelerator.is_main_process:
        keep_first_gradients(module, folder / "gradients")
    samples, logger = Samples(8 if on_gpu else 7), Logger(folder)
    runner.launch_training_task(accelerator, samples, module, logger, learning_rate=1e-2, num_workers=0, num_epochs=1)
    notes = wanshim.report().row("diffsynth.model_split").notes if os.environ.get("WANSHIM_DEVICES") else ()
    said = {"seen": module.seen, "notes": list(notes), "bypass": os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP")}
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
