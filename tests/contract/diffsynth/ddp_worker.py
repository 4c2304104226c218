"""Training jobs of one rank: a forked process, or one that `accelerate launch -m` starts, on the CPU or on GPUs
(ON_GPU=1).

Each sample brings its own draws, so that any number of processes sees the same noise.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

import wanshim
from tests.compiling import use_aot_eager
from tests.contract.diffsynth import faults, kernels
from wanshim import hand_over

BYPASS = "ACCELERATE_BYPASS_DEVICE_MAP"
# DiffSynth before 2.0.10 loses all micro-batches of a step but the last: no process alone would have the gradients of a
# global batch.
EVERY_MICRO_BATCH = "diffsynth.gradient_accumulation"


@dataclass(frozen=True)
class Job:
    """`accumulation`: micro-batches a step and process; `base`: what the blocks are stored as, if not as made; `clip`:
    a clip and a prompt are encoded in the loop, and noise and timestep are drawn by each process from its own seed;
    `fault`: what befalls the last rank in its second forward; `streamed`: blocks that the plan is made to stream;
    `inductor`: False runs compiled graphs by eager's kernels; `video`: its arguments say how large the videos are;
    `own_weights`: what is trained begins with other values on each rank; `weight_term`: the loss has a term on it;
    `sage`: SageAttention, which has no backward, is installed."""

    name: str
    samples: int
    accumulation: int
    dtype: str = "bfloat16"
    base: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    clip: bool = False
    fault: str = ""
    streamed: int = 0
    inductor: bool = True
    video: bool = False
    own_weights: bool = False
    weight_term: bool = False
    sage: bool = False


def run(job: Job, folder: Path) -> dict[str, Any]:
    """The job in this process; what this rank saw, and the gradients of its first step in `folder`."""
    from accelerate import Accelerator
    from diffsynth.diffusion import runner

    from tests.contract.diffsynth import video_job
    from tests.contract.diffsynth.training import Logger, Samples, Training, wan_pipe

    torch.manual_seed(11)
    on_gpu = "ON_GPU" in os.environ
    accelerator = Accelerator(cpu=not on_gpu, gradient_accumulation_steps=job.accumulation)
    if job.clip:
        return run_clip(job, folder, accelerator)
    make = video_job.module_with_video if job.video else Training
    module = make(own_draws=True, pipe=wan_pipe(str(accelerator.device), getattr(torch, job.dtype)))
    options: dict[str, Any] = {"learning_rate": 1e-2, "num_workers": 0}
    if job.video:
        options = {"args": Namespace(**video_job.VIDEO | video_job.REST)}
    if job.fault and accelerator.is_last_process:
        module.register_forward_pre_hook(faults.BEFALLS[job.fault])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if job.own_weights:
        for parameter in trained:
            parameter.data += accelerator.process_index
    if job.weight_term:
        module.register_forward_hook(lambda _, args, loss: loss + sum(p.float().square().mean() for p in trained))
    if job.base is not None and "WANSHIM_BASE" not in job.variables:
        from wanshim.core.model_split.quantize import quantize_base

        quantize_base(module.pipe.dit.blocks, job.base)
    rank, said = accelerator.process_index, {"written": [], "bypass": []}
    module.register_forward_pre_hook(lambda *_: said["bypass"].append(os.environ.get(BYPASS)))
    with pytest.MonkeyPatch.context() as patch:
        count_files(said["written"], patch)
        keep_first_gradients(module, folder / f"{job.name}.gradients{rank}")
        for name, value in job.variables.items():
            patch.setenv(name, value)
        activate_again()
        if job.streamed:
            stream_by_plan(job.streamed, patch)
        if job.sage:
            kernels.install(patch, kernels.sage)
        if not job.inductor:
            use_aot_eager(patch)
        runner.launch_training_task(accelerator, Samples(job.samples), module, Logger(folder / job.name), **options)
    return {**said, "seen": module.seen, "notes": notes(), "bypass_after": os.environ.get(BYPASS)}


def notes() -> list[str]:
    return notes_of("diffsynth.model_split")


def notes_of(feature: str) -> list[str]:
    """Nothing where it was not selected."""
    return list(wanshim.report().row(feature).notes)


def run_clip(job: Job, folder: Path, accelerator: Any) -> dict[str, Any]:
    """A tiny checkpoint with text encoder and VAE; how often this rank calls them."""
    from diffsynth.diffusion import ModelLogger, runner

    from tests.contract.diffsynth import clip_job
    from wanshim.demo import wan_checkpoint

    files = wan_checkpoint.write(folder / f"checkpoint{accelerator.process_index}")
    wan_checkpoint.register(files)
    torch.manual_seed(2)
    module = clip_job.make_module(files)
    calls: dict[str, int] = {"text_encoder": 0, "vae": 0}

    def count(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        setattr(owner, method, counted)

    count(module.pipe.text_encoder, "forward", "text_encoder")
    count(module.pipe.vae, "encode", "vae")
    with pytest.MonkeyPatch.context() as patch:
        keep_first_gradients(module, folder / f"{job.name}.gradients{accelerator.process_index}")
        for name, value in job.variables.items():
            patch.setenv(name, value)
        activate_again()
        torch.manual_seed(5 + accelerator.process_index)
        logger = ModelLogger(str(folder / job.name), remove_prefix_in_ckpt="pipe.dit.")
        clips = clip_job.OneClip()
        runner.launch_training_task(accelerator, clips, module, logger, learning_rate=1e-2, num_workers=0)
    encodes = [note.splitlines()[0] for note in notes_of("diffsynth.vae_encode")]
    return {"calls": calls, "notes": notes(), "encodes": encodes, "draw": torch.rand(()).item()}


def keep_first_gradients(module: torch.nn.Module, path: Path) -> None:
    """Write what the first optimizer step sees; AdamW would blow a last bit of it up to a whole step."""

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if path.exists():
            return  # a hook may not remove itself while torch goes through them
        named = module.named_parameters()
        path.parent.mkdir(exist_ok=True)
        save_file({name: p.grad.cpu() for name, p in named if p.grad is not None}, path)

    register_optimizer_step_pre_hook(keep)


def stream_by_plan(blocks: int, patch: pytest.MonkeyPatch) -> None:
    """Every plan streams so many blocks: on the CPU there is no limit that would ask for it."""
    from wanshim.adapters.diffsynth.splitting import launch

    decide = launch.decide
    patch.setattr(launch, "decide", lambda *given: replace(decide(*given), streamed_blocks=blocks))


def activate_again() -> None:
    """With the variables as they are now; a job without a plan has no split, which several processes would refuse."""
    splits = {"WANSHIM_PLAN", "WANSHIM_DEVICES"} & os.environ.keys()
    features = os.environ.get("JOBS_FEATURES") or hand_over.inherited()
    if features is not None and not splits:
        features = ",".join(name for name in features.split(",") if name != "diffsynth.model_split")
    wanshim.activate(features)


def count_files(names: list[str], patch: pytest.MonkeyPatch) -> None:
    """Note every file that accelerate writes in this process."""
    from accelerate.utils import other

    write = other.safe_save_file
    patch.setattr(other, "safe_save_file", lambda t, f, *a, **k: (names.append(Path(f).name), write(t, f, *a, **k))[1])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms("ON_GPU" in os.environ)
    if name := os.environ.get("MACHINE"):  # one machine cannot be two, and not every user may rename it
        socket.gethostname = lambda: name
    jobs = [Job(**job) for job in json.loads(os.environ["JOBS"])]
    splits = os.environ.get("WANSHIM_DEVICES") or any("WANSHIM_PLAN" in job.variables for job in jobs)
    with pytest.MonkeyPatch.context() as patch:
        for job in jobs:
            if plan := job.variables.get("WANSHIM_PLAN"):
                patch.setenv("WANSHIM_PLAN", plan)
        features = ["none", EVERY_MICRO_BATCH, *(["diffsynth.model_split"] if splits else [])]
        os.environ["JOBS_FEATURES"] = ",".join([*features, *os.environ.get("MORE_FEATURES", "").split()])
        wanshim.activate(os.environ["JOBS_FEATURES"])
    found = {job.name: run(job, folder) for job in jobs}
    (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def enter(folder: Path, environment: dict[str, str]) -> None:
    """Be the process of these variables; what it prints is kept in `folder`."""
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(folder / f"rank{environment.get('RANK', '0')}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    main(folder)


def as_variable(jobs: list[Job]) -> str:
    return json.dumps([asdict(job) for job in jobs])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
