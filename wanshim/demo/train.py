"""`wanshim demo`: DiffSynth trains a LoRA on a real clip, alone and then over several devices; both are compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from wanshim.demo import clip
from wanshim.demo.comparison import check_installed
from wanshim.errors import WanshimError

ACCUMULATION = 2
PACKAGES = ("torch", "diffsynth", "accelerate", "peft")
PLANS = ("split", "sequence")
WITHIN = 0.02  # of a loss: bf16 rounds in another order where tokens are sharded
console = Console()


@dataclass
class DemoRun:
    """The result of one training job."""

    title: str
    lora: Path
    losses: list[float] = field(default_factory=list)
    features: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Way:
    """A way to run a training job: under which variables, in how many processes, and how close it is to one process."""

    title: str
    variables: dict[str, str]
    processes: int = 1
    exact: bool = True


ALONE = Way("alone", {"WANSHIM_FEATURES": "none"})


def run(*, frames: int, plan: str, devices: str, steps: int, output: Path, video: Path | None) -> None:
    """Train a LoRA with DiffSynth on a real clip, alone and over several GPUs, and compare."""
    # A split, one process over the devices, agrees in every bit of losses and LoRA. Sequence parallel, a process for
    # each GPU or two on the CPU, computes in another order: its losses agree WITHIN the rounding of bf16.
    named = [name.strip() for name in devices.split(",") if name.strip()]
    clip.check_frames(frames)
    if steps < 1:
        raise WanshimError(f"--steps {steps}", expected="1 or more optimizer steps")
    if plan not in PLANS:
        raise WanshimError(f"--plan {plan}", expected=f"one of {', '.join(PLANS)}")
    if plan == "sequence" and named:
        raise WanshimError("--plan sequence with --devices", expected="no devices: each process has one GPU")
    check_installed(*PACKAGES)
    source = clip.find(video)
    console.print(f"clip        {source}")
    if plan == "split":
        named = named or _default_devices()
        way = Way("split", {"WANSHIM_FEATURES": "diffsynth.model_split", "WANSHIM_DEVICES": ",".join(named)})
        console.print(f"devices     {', '.join(named)}")
        if len(set(named)) == 1:
            console.print("            one device holds all stages: placement and hooks are real, but nothing crosses")
    else:
        way = _sequence()
        console.print(f"processes   {way.processes}, each with a share of every sample's tokens")
    job = arguments(output, source, frames, steps)
    plain = train(ALONE, job, output / ALONE.title, steps)
    several = train(way, job, output / way.title, steps)
    for feature in several.features:
        for note in feature["notes"]:
            console.print(f"\n{feature['feature']}: {note}", highlight=False)
    if not _compare(plain, several, way):
        raise SystemExit(1)


def arguments(output: Path, source: Path, frames: int, steps: int) -> list[str]:
    """Arguments of `train_lora` but for its output folder; its checkpoint is written to `output`."""
    from wanshim.demo import wan_checkpoint

    output.mkdir(parents=True, exist_ok=True)
    files = wan_checkpoint.write(output / "checkpoint")
    size = sum(path.stat().st_size for path in files.models) / 2**20
    console.print(f"checkpoint  {files.folder} ({size:.1f} MiB, DiffSynth's file layout, random weights)\n")
    job = ["--checkpoint", str(files.folder), "--video", str(source), "--frames", str(frames), "--steps", str(steps)]
    return [*job, "--accumulation", str(ACCUMULATION)]


def _sequence() -> Way:
    import torch

    count = torch.cuda.device_count()
    variables = {"WANSHIM_FEATURES": "diffsynth.model_split", "WANSHIM_PLAN": "sequence"}
    if count < 2:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}  # two processes cannot share one GPU
    return Way("sequence", variables, processes=max(count, 2), exact=False)


def _default_devices() -> list[str]:
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        return [f"cuda:{i}" for i in range(count)]
    return ["cuda:0" if count else "cpu"] * 2


def train(way: Way, job: list[str], folder: Path, steps: int, kill_after: int | None = None) -> DemoRun:
    """One job in processes of its own, under `wanshim run` as a user would start it.

    Args:
        kill_after: micro-batches, after which it is killed.

    Raises:
        WanshimError: it ended otherwise.
    """
    from wanshim.launch import start  # here: every command imports this module

    result = DemoRun(way.title, folder / "epoch-0.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    environment = start.environment() | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"} | way.variables
    command = [sys.executable, "-m", "wanshim.demo.train_lora", *job, "--output", str(folder)]
    if way.processes > 1:
        command = [sys.executable, "-m", "wanshim", "run", "--gpus", str(way.processes), "--no-report", "--", *command]
    log = folder / "training.log"
    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with log.open("w") as errors, Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as bar:
        task = bar.add_task(way.title, total=steps * ACCUMULATION, loss="loading")
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in process.stdout or ():
                _read_line(line, result)
                if result.losses:
                    bar.update(task, completed=len(result.losses), loss=f"loss {result.losses[-1]:.4f}")
                if len(result.losses) == kill_after:
                    process.kill()
                    break
    if process.returncode != (0 if kill_after is None else -signal.SIGKILL):
        raise WanshimError(
            f"the training named {way.title} ended with exit status {process.returncode}: {_last_line(log)}",
            hint=f"See {log}",
        )
    return result


def _read_line(line: str, result: DemoRun) -> None:
    if line.startswith("{"):
        try:
            data = json.loads(line)
        except ValueError:
            return
        if "loss" in data:
            result.losses.append(data["loss"])
        elif "feature" in data:
            result.features.append(data)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _compare(alone: DemoRun, several: DemoRun, way: Way) -> bool:
    import torch
    from safetensors.torch import load_file

    ours, theirs = load_file(several.lora), load_file(alone.lora)
    trained = sum(bool(tensor.any()) for name, tensor in theirs.items() if "lora_B" in name)
    table = Table("micro-batch", "loss alone", f"loss {way.title}", "equal" if way.exact else "apart")
    for i, (a, b) in enumerate(zip(alone.losses, several.losses, strict=False), 1):
        said = ("yes" if a == b else "NO") if way.exact else f"{abs(a - b) / abs(a):.2%}"
        table.add_row(str(i), f"{a:.6f}", f"{b:.6f}", said)
    console.print()
    console.print(table)
    if way.exact:
        equal = sum(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if name in ours)
        console.print(f"LoRA tensors  {equal} of {len(theirs)} equal bit for bit; {trained} lora_B have left zero")
        same = alone.losses == several.losses and equal == len(theirs)
    else:
        console.print(f"LoRA tensors  {len(ours)} of {len(theirs)} written once; {trained} lora_B have left zero")
        same = len(alone.losses) == len(several.losses)
        same = same and all(abs(a - b) <= WITHIN * abs(a) for a, b in zip(alone.losses, several.losses, strict=False))
    console.print(f"LoRA file     {several.lora}")
    same = same and len(alone.losses) > 0 and ours.keys() == theirs.keys() and trained > 0
    verdict = "agree" if same else "DIFFER"
    console.print(f"[{'green' if same else 'red'}]one process and {way.title} {verdict}[/]")
    return same
