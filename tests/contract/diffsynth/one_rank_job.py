"""A user's training script whose logger and folder are written for one process, or for one of several.

Each rank writes what it saw to seen.RANK.json. Argument 1: a folder with `checkpoint`.
"""

import json
import os
import random
import sys
import uuid
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from tests.roads import train

RANK = int(os.environ.get("RANK", 0))
seen: dict[str, Any] = {}


class Logger(train.Logger):
    def on_step_end(self, accelerator: Any, model: Any, save_steps: Any = None, **more: Any) -> None:
        super().on_step_end(accelerator, model, save_steps, **more)
        loss = self.loss(accelerator, accelerator.unwrap_model(model))
        mine = torch.full((1 + RANK,), loss.item())
        names = broadcast_object_list([str(uuid.uuid4())])
        with accelerator.split_between_processes(list(range(8))) as part:
            seen.setdefault("split", list(part))
        seen.setdefault("loss", []).append(loss.item())
        seen.setdefault("reduced", []).append(accelerator.reduce(loss, "mean").item())
        seen.setdefault("gathered", []).append(accelerator.gather_for_metrics(loss).tolist())
        seen.setdefault("objects", []).append(gather_object([loss.item()]))
        seen.setdefault("padded", []).append(accelerator.gather(accelerator.pad_across_processes(mine)).numel())
        seen.setdefault("names", []).append(names)
        seen["processes"] = [accelerator.num_processes, accelerator.process_index, accelerator.is_main_process]
        everyone = torch.ones(())
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(everyone)
        seen["ranks"] = int(everyone)
        accelerator.on_main_process(self.validate)(accelerator, model)
        accelerator.wait_for_everyone()

    def validate(self, accelerator: Any, model: Any) -> None:
        seen["validated"] = seen.get("validated", 0) + 1
        if accelerator.num_processes == 1:
            accelerator.wait_for_everyone()
        random.random()
        torch.rand(1)
        with torch.no_grad():
            module = accelerator.unwrap_model(model)
            module(train.Clips(module.args)[0])
            module.losses.pop()


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    made = Path("made") / str(uuid.uuid4()) if RANK else Path("made", "first")
    os.makedirs("once")  # noqa: PTH103 - as a script does it
    sys.argv += [
        "--dataset_base_path",
        "",
        "--dataset_num_workers",
        "0",
        "--checkpoint",
        str(folder / "checkpoint"),
        "--output_path",
        str(made),
    ]
    train.Logger = Logger  # type: ignore[misc]
    train.main()
    Path(f"seen.{RANK}.json").write_text(json.dumps(seen))
