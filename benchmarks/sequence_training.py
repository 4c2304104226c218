"""DiffSynth's own training loop on the 14B Wan DiT with each sample over all GPUs, as a user starts it.

    wanshim run --gpus 4 -- python benchmarks/sequence_training.py --json benchmarks/results/sequence_training.json
    wanshim run --gpus 4 -- python benchmarks/sequence_training.py --gib 22 --height 720 --width 1280 --frames 81
    wanshim run --gpus 1 --fast -- python benchmarks/sequence_training.py --gib 16

Model, shapes and LoRA as in model_split.py, with AdamW, gradient checkpointing, accumulation 1; the samples are cached
latents and prompts. Prints seconds a step, the measured peak and wanshim's plan with the predicted one. `--gib` holds
each GPU to that much memory with `torch.cuda.set_per_process_memory_fraction`, or each of several to its own
(`--gib 60,100`); the model then waits on the host until training begins, as a pipeline that DiffSynth loads does.
Started without --gpus it is DiffSynth alone on one GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffsynth.diffusion import DiffusionTrainingModule, FlowMatchSFTLoss, ModelLogger, runner
from diffsynth.diffusion.flow_match import FlowMatchScheduler
from diffsynth.pipelines.wan_video import model_fn_wan_video

from wanshim.core.shared.gpu_memory import indexed


class Pipe(torch.nn.Module):
    """What the loss and the plan ask of a pipeline whose text encoder and VAE have done their work."""

    in_iteration_models = ("dit",)
    height_division_factor = width_division_factor = 16
    time_division_factor = 4

    def __init__(self, dit: Any, device: torch.device) -> None:
        super().__init__()
        self.dit, self.model_fn = dit, model_fn_wan_video
        self.scheduler = FlowMatchScheduler("Wan")
        self.scheduler.set_timesteps(1000, training=True)
        self.device, self.torch_dtype = device, torch.bfloat16


class Training(DiffusionTrainingModule):  # type: ignore[misc]
    def __init__(self, dit: Any, device: torch.device) -> None:
        super().__init__()
        self.pipe = Pipe(dit, device)

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        sample = {name: tensor.to(self.pipe.device) for name, tensor in (inputs or data).items()}
        return FlowMatchSFTLoss(self.pipe, **sample, use_gradient_checkpointing=True)


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    load_from_cache = False

    """Made before training begins, as samples of a cache are."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.samples = [self._make(index) for index in range(args.repeats + 1)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]

    def _make(self, index: int) -> dict[str, torch.Tensor]:
        like: dict[str, Any] = {"dtype": torch.bfloat16, "generator": torch.Generator().manual_seed(index)}
        shape = (1, 16, (self.args.frames - 1) // 4 + 1, self.args.height // 8, self.args.width // 8)
        return {
            "input_latents": torch.randn(shape, **like),
            "context": torch.randn((1, 512, self.args.text_dim), **like),
        }


class Clock(ModelLogger):  # type: ignore[misc]
    """Notes when each step ends, and saves nothing but the last LoRA."""

    def __init__(self, folder: str, on_cuda: bool) -> None:
        super().__init__(folder)
        self.on_cuda, self.ends, self.losses = on_cuda, [time.perf_counter()], []

    def on_step_end(self, accelerator: Any, model: Any, save_steps: Any = None, **kwargs: Any) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
            if len(self.ends) == 1:
                torch.cuda.reset_peak_memory_stats()
        self.ends.append(time.perf_counter())
        self.losses.append(float(kwargs["loss"]) if "loss" in kwargs else None)


def gibs(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=gibs, help="memory of each GPU, or one number a GPU")
    parser.add_argument("--output", default="sequence-training-output")
    parser.add_argument("--json", type=Path)


def run(
    args: argparse.Namespace,
    build: Callable[[argparse.Namespace, str], Any],
    samples: Callable[[argparse.Namespace], Any],
    training: Callable[[Any, torch.device], Any],
) -> None:
    """DiffSynth's loop of one model on its samples; the first process reports.

    Args:
        build: makes the DiT with LoRA on a device.
        training: makes the training module of that DiT.
    """
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device = indexed(accelerator.device)
    on_cuda = device.type == "cuda"
    dit = build(args, str(device))
    if args.gib and on_cuda:
        dit.to("cpu")
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        gib = args.gib[accelerator.process_index % len(args.gib)]
        torch.cuda.set_per_process_memory_fraction(min(gib * 2**30 / total, 1.0), device)
    clock = Clock(args.output, on_cuda)
    begin = time.perf_counter()
    # taken from its module now, as a script that imports it after wanshim is active has it
    runner.launch_training_task(accelerator, samples(args), training(dit, device), clock, args=options_of_script(args))
    steps = [after - before for before, after in zip(clock.ends[1:], clock.ends[2:], strict=False)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else 0.0
    plans, peaks = gather_object([planned()]), gather_object([peak])
    if accelerator.process_index == 0:
        report(args, steps, clock, peaks, plans, begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    base.add_sizes(parser)
    run(parser.parse_args(), base.build, Samples, Training)


def options_of_script(args: argparse.Namespace) -> argparse.Namespace:
    """What DiffSynth's training script hands to its launcher."""
    return argparse.Namespace(
        height=args.height, width=args.width, num_frames=args.frames, use_gradient_checkpointing=True,
        learning_rate=1e-4, weight_decay=0.01, dataset_num_workers=0, save_steps=10**6, num_epochs=1,
        enable_model_cpu_offload=False, enable_optimizer_cpu_offload=False, cpu_offload_split_threshold=None,
        customized_optimizer=None, output_path=args.output,
    )  # fmt: skip


def planned() -> list[str]:
    """What this rank's report says of the plan."""
    import wanshim

    rows = {row.feature: row for row in wanshim.report(strict=False).rows}
    row = rows.get("diffsynth.model_split")
    return list(row.notes) if row is not None else []


def report(
    args: argparse.Namespace, steps: list[float], clock: Clock, peaks: list[float], plans: list[list[str]], begin: float
) -> None:
    found = base.environment(args) | {
        "gpus": len(plans),
        "gib": args.gib[0] if args.gib and len(args.gib) == 1 else args.gib,
        "seconds": steps,
        "median": statistics.median(steps),
        "until_first_step_ended": clock.ends[1] - begin,
        "peak_GiB": max(peaks),
        "peaks_GiB": peaks,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
        "losses": clock.losses,
        "plan": plans[0],
        "same_plan": all(plan == plans[0] for plan in plans),
    }
    print(f"{len(plans)} GPUs: {found['median']:.3f} s a step, peak {max(peaks):.2f} GiB", flush=True)
    print("\n".join(found["plan"]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
