"""A training as its user starts it, in one or several processes: its losses, what it drew, and its end.

`train` writes FOLDER/seen.RANK.ATTEMPT.jsonl, a line for each forward.

    python -m tests.contract.diffsynth.resume_job FOLDER '{"at": 9, "end": "SIGKILL"}'
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffsynth.diffusion import runner

from tests.contract.diffsynth.training import Logger, Samples, Training, wan_pipe
from wanshim.adapters.diffsynth.resuming.run import ended

LAYERS = 2  # as few as two stages are made of: a test trains three times


class Drawing(Samples):
    """Each sample draws from all that training draws from, as random augmentation does."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "noise": [torch.rand(()).item(), random.random(), np.random.rand()]}


class Broken(Drawing):
    """Its last sample cannot be loaded."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == len(self) - 1:
            raise OSError("moov atom not found")
        return super().__getitem__(index)


class OwnGenerators(Drawing):
    """Draws from generators that it holds, as augmentations do: its own, in a list, and of an object that it holds."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.torch, self.crops = torch.Generator().manual_seed(3), [random.Random(4)]
        self.noise = SimpleNamespace(generator=np.random.default_rng(5), legacy=np.random.RandomState(6))
        self.noise.dataset = self

    def __getitem__(self, index: int) -> dict[str, Any]:
        own = [torch.rand((), generator=self.torch).item(), self.crops[0].random(), self.noise.generator.random()]
        return {"number": index, "noise": [*own, self.noise.legacy.rand()]}


class Nested(torch.optim.Optimizer):
    """Averages in dicts and lists, wider than the weights; counts in bytes and by itself, beside torch's state."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["quantized"], state["table"] = (
                        torch.zeros(p.shape, dtype=torch.uint8),
                        torch.linspace(0, 1, 256),
                    )
                    state["nested"] = {"average": torch.zeros(p.shape), "deeper": {"count": torch.zeros(1).long()}}
                    state["parts"] = [torch.zeros(p.shape)]
                state["nested"]["deeper"]["count"] += 1
                state["quantized"].add_(1)
                state["nested"]["average"].mul_(0.9).add_(p.grad.float(), alpha=0.1 + 1e-5)
                state["parts"][0].mul_(0.8).add_(p.grad.float(), alpha=0.2 + 1e-5)
                size = state["table"][state["quantized"].long()] + 0.1 * state["nested"]["deeper"]["count"]
                update = (state["nested"]["average"] + state["parts"][0]) * size * self.calls
                p.sub_((group["lr"] * update).to(p.dtype))


PLACES = ("forward", "backward", "optimizer", "write", "rename", "renamed")


class KilledAt:
    """This process is killed when it comes to a place for the Nth time."""

    def __init__(self, place: str, times: int) -> None:
        self.place, self.left = place, times

    def attach(self) -> None:
        import safetensors.torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        save_file, replace = safetensors.torch.save_file, Path.replace

        def write(tensors: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            save_file(tensors, file, *args, **kwargs)
            if "training_state" in str(file) and self.is_now("write"):
                os.truncate(file, Path(file).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        def rename(path: Path, target: Path) -> Path:
            if "training_state" not in str(target):
                return replace(path, target)
            self.come_to("rename")
            result = replace(path, target)
            self.come_to("renamed")
            return result

        safetensors.torch.save_file = write
        Path.replace = rename  # type: ignore[method-assign, assignment]
        register_optimizer_step_post_hook(lambda *_: self.come_to("optimizer"))

    def is_now(self, place: str) -> bool:
        self.left -= place == self.place
        return place == self.place and self.left == 0

    def come_to(self, place: str) -> None:
        if self.is_now(place):
            os.kill(os.getpid(), signal.SIGKILL)


class Job(Training):
    def __init__(
        self,
        seen: Path,
        at: int | None,
        end: str | None,
        killed: KilledAt | None,
        device: str = "cpu",
        **sizes: int,
    ) -> None:
        super().__init__(pipe=wan_pipe(device, **{"layers": LAYERS, **sizes}))
        if killed is not None:
            killed.attach()
            trained = next(parameter for parameter in self.parameters() if parameter.requires_grad)
            trained.register_hook(lambda _: killed.come_to("backward"))
        self.killed = killed
        self.seen_in, self.at, self.end = seen, at, end
        self.forwards = itertools.count()  # of this process

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        if next(self.forwards) == self.at and self.end is not None:
            if self.end == "error":
                raise torch.OutOfMemoryError("no room for this one")
            os.kill(os.getpid(), signal.Signals[self.end])
        if self.killed is not None:
            self.killed.come_to("forward")
        loss = super().forward(data, inputs)
        with self.seen_in.open("a") as file:
            file.write(json.dumps([data["number"], data["noise"], loss.item()]) + "\n")
        return loss


def train(
    folder: Path, seed: int = 5, at: int | None = None, end: str | None = None, accumulation: int = 1,
    workers: int = 0, epochs: int = 2, samples: int = 7, attempt: int = 0, only: int | None = None,
    dataset: Any = None, killed: tuple[str, int] | None = None, sizes: Mapping[str, int] = {}, calls: int = 1,
    precision: str = "no", broken: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Args: at, end: the forward in which the process ends, and how: a signal's name or "error"; killed: one of
    `PLACES` and when; only: in this rank; calls: of the launcher, one after the other; precision:
    accelerate's mixed precision."""
    ended.clear()  # as in a new process
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, mixed_precision=precision)
    rank = accelerator.process_index
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(11)
    if only not in (None, rank):
        end = killed = None
    seen_in, kill = folder / f"seen.{rank}.{attempt}.jsonl", KilledAt(*killed) if killed else None
    module = Job(seen_in, at, end, kill, str(accelerator.device), **sizes)
    for draw in (torch.manual_seed, random.seed, np.random.seed):
        draw(seed)
    options = {"learning_rate": 1e-2, **options}
    for _ in range(calls):
        runner.launch_training_task(
            accelerator,
            dataset or (Broken if broken else Drawing)(samples),
            module,
            Logger(folder),
            num_workers=workers,
            num_epochs=epochs,
            **options,
        )


def seen(folder: Path, rank: int, attempt: int) -> list[Any]:
    path = folder / f"seen.{rank}.{attempt}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)
    train(Path(sys.argv[1]), **json.loads(sys.argv[2]))
