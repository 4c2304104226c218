"""`wanshim demo`: DiffSynth trains a LoRA on a real clip, unsplit and then split, and both are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from wanshim.cli import launch
from wanshim.cli.demo import clip
from wanshim.errors import WanshimError

ACCUMULATION = 2


@dataclass
class Run:
    """What one training job did."""

    title: str
    lora: Path
    losses: list[float] = field(default_factory=list)
    features: list[dict[str, object]] = field(default_factory=list)


def run(
    *, frames: int, devices: Sequence[str], steps: int, output: Path, video: Path | None, console: Console | None = None
) -> bool:
    """Train unsplit and split, print both, return whether losses and LoRA tensors are equal bit for bit.

    Args:
        frames: of the clip, 4n + 1.
        devices: the stages; empty: all GPUs, or the CPU twice.
        steps: optimizer steps, each of two micro-batches.
        output: folder for checkpoint, LoRA files and logs.
    """
    console = console or Console()
    if frames < 1 or frames % 4 != 1:
        raise WanshimError(
            f"--frames {frames}", expected="4n + 1, such as 5, 9 or 49: the Wan VAE takes one and then fours"
        )
    if steps < 1:
        raise WanshimError(f"--steps {steps}", expected="1 or more optimizer steps")
    source = clip.find(video)
    names = list(devices) or _default_devices()
    output.mkdir(parents=True, exist_ok=True)
    console.print(f"clip        {source}")
    console.print(f"devices     {', '.join(names)}")
    if len(set(names)) == 1:
        console.print("            one device holds all stages: placement and hooks are real, but nothing crosses")
    from wanshim.cli.demo import wan_checkpoint

    files = wan_checkpoint.write(output / "checkpoint")
    size = sum(path.stat().st_size for path in files.models) / 2**20
    console.print(f"checkpoint  {files.folder} ({size:.1f} MiB, DiffSynth's file layout, random weights)\n")
    job = ["--checkpoint", str(files.folder), "--video", str(source), "--frames", str(frames), "--steps", str(steps)]
    job += ["--accumulation", str(ACCUMULATION)]
    plain = _train("unsplit", "none", {}, job, output / "unsplit", steps, console)
    split = {"WANSHIM_DEVICES": ",".join(names)}
    parted = _train("split", "diffsynth.model_split", split, job, output / "split", steps, console)
    for feature in parted.features:
        for note in feature["notes"]:  # type: ignore[attr-defined]
            console.print(f"\n{feature['feature']}: {note}", highlight=False)
    return _compare(plain, parted, console)


def _default_devices() -> list[str]:
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        return [f"cuda:{i}" for i in range(count)]
    return ["cuda:0" if count else "cpu"] * 2


def _train(
    title: str, features: str, extra: dict[str, str], job: list[str], folder: Path, steps: int, console: Console
) -> Run:
    """One job in a process of its own, under `wanshim run` as a user would start it."""
    result = Run(title, folder / "epoch-0.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    environment = launch.environment(features) | extra | {"TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "wanshim.cli.demo.train_lora", *job, "--output", str(folder)]
    log = folder / "training.log"
    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with log.open("w") as errors, Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as bar:
        task = bar.add_task(title, total=steps * ACCUMULATION, loss="loading")
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in process.stdout or ():
                _read_line(line, result)
                if result.losses:
                    bar.update(task, completed=len(result.losses), loss=f"loss {result.losses[-1]:.4f}")
    if process.returncode != 0:
        raise WanshimError(
            f"the {title} training ended with exit status {process.returncode}: {_last_line(log)}", hint=f"See {log}"
        )
    return result


def _read_line(line: str, result: Run) -> None:
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


def _compare(plain: Run, parted: Run, console: Console) -> bool:
    import torch
    from safetensors.torch import load_file

    ours, theirs = load_file(parted.lora), load_file(plain.lora)
    equal = [name for name in theirs if name in ours and torch.equal(ours[name], theirs[name])]
    trained = sum(bool(tensor.any()) for name, tensor in theirs.items() if "lora_B" in name)
    table = Table("micro-batch", "loss unsplit", "loss split", "equal")
    for i, (a, b) in enumerate(zip(plain.losses, parted.losses, strict=False), 1):
        table.add_row(str(i), f"{a:.6f}", f"{b:.6f}", "yes" if a == b else "NO")
    console.print()
    console.print(table)
    console.print(f"LoRA tensors  {len(equal)} of {len(theirs)} equal bit for bit; {trained} lora_B have left zero")
    console.print(f"LoRA file     {parted.lora}")
    same = plain.losses == parted.losses and len(plain.losses) > 0
    same = same and len(equal) == len(theirs) == len(ours) and trained > 0
    console.print("[green]split and unsplit agree[/green]" if same else "[red]split and unsplit DIFFER[/red]")
    return same
