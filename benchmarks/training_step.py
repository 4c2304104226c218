"""One GPU's LoRA step of the 14B Wan DiT: as DiffSynth runs it, and with what wanshim can change in a block.

    python benchmarks/training_step.py --device cuda:0 --json benchmarks/results/training_step_1xH200.json
    python benchmarks/training_step.py --device cpu --layers 4 --dim 64 --ffn-dim 96 --heads 2 --text-dim 32 --rank 4 \
        --height 64 --width 64 --frames 9

Model, shapes and LoRA as in model_split.py, with AdamW. Arms: DiffSynth's own step (eager); self-attention kept on the
GPU, or in host memory; blocks compiled; the base's products in eight bits; several of these together. Prints seconds
a step (the fastest and all), the predicted peak beside the measured one, and, of one more step with deterministic
kernels, how loss and LoRA gradients compare with eager: equal ones, the farthest by norm, and the smallest cosine, of
all and of those whose norm counts. The record is written after each arm.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base
import model_split_capacity as capacity

from wanshim.adapters.diffsynth.compiled_blocks import compile_blocks
from wanshim.adapters.diffsynth.eight_bit_compute import compute_blocks
from wanshim.adapters.diffsynth.kept_attention import keep_attention
from wanshim.adapters.diffsynth.splitting.micro_batch import micro_batch
from wanshim.core.strategy import KeptOn, Step, Stored, predict, store_of
from wanshim.undo import Undo

Reference = tuple[float, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Arm:
    """What is changed of DiffSynth's step."""

    keep: KeptOn | None = None
    compile: bool = False
    compute: str | None = None

    def apply(self, model: torch.nn.Module, undo: Undo, report: Callable[[str], None]) -> None:
        if self.compute is not None:
            compute_blocks(SimpleNamespace(dit=model), self.compute, undo, report)
        if self.compile:
            compile_blocks(SimpleNamespace(dit=model), undo, report)
        if self.keep is not None:
            keep_attention(undo, report, self.keep)


ARMS = {
    "eager": Arm(),
    "keep": Arm(keep=KeptOn.DEVICE),
    "keep on host": Arm(keep=KeptOn.HOST),
    "compile": Arm(compile=True),
    "compile+keep": Arm(keep=KeptOn.DEVICE, compile=True),
    "float8+keep": Arm(keep=KeptOn.DEVICE, compute="float8"),
    "float8+compile+keep": Arm(keep=KeptOn.DEVICE, compile=True, compute="float8"),
    "int8+compile+keep": Arm(keep=KeptOn.DEVICE, compile=True, compute="int8"),
}


def predicted(model: Any, args: argparse.Namespace, arm: Arm) -> float:
    """The peak in GiB, as a plan predicts it."""
    pipe = SimpleNamespace(dit=model, torch_dtype=torch.bfloat16)
    tokens = ((args.frames - 1) // 4 + 1) * (args.height // 16) * (args.width // 16)
    blocks = tuple(store_of(block) for block in model.blocks)
    inside, everything = sum(blocks[1:], blocks[0]), store_of(model)
    home = Stored(everything.frozen - inside.frozen, everything.trained - inside.trained)
    step = Step(blocks, home, (args.device,), (), micro_batch(pipe, tokens, None), keep=arm.keep)
    return round(predict(step)[0].total / 2**30, 2)


def compare(found: Reference, expected: Reference) -> dict[str, Any]:
    """Of every LoRA gradient, against eager: equal bits, distance by norm, cosine."""
    (loss, ours), (expected_loss, theirs) = found, expected
    distances, cosines, norms = {}, {}, {}
    for name, gradient in theirs.items():
        a, b = ours[name].double().flatten(), gradient.double().flatten()
        distances[name] = ((a - b).norm() / b.norm()).item()
        cosines[name] = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
        norms[name] = b.norm().item()
    farthest = max(distances, key=distances.__getitem__)
    equal = sum(torch.equal(ours[name], theirs[name]) for name in theirs)
    return {
        "loss": [loss, expected_loss],
        "gradients_equal": f"{equal} of {len(theirs)}",
        "distance": {"middle": sorted(distances.values())[len(distances) // 2], "farthest": distances[farthest]},
        "farthest": {"name": farthest, "norm": theirs[farthest].double().norm().item()},
        "smallest_cosine": min(cosines.values()),
        # of the gradients that make up all but a thousandth of the squared norm of all
        "smallest_cosine_that_counts": min(cosines[name] for name in _that_count(norms)),
    }


def _that_count(norms: dict[str, float]) -> list[str]:
    total, found = sum(norm**2 for norm in norms.values()), 0.0
    names = []
    for name in sorted(norms, key=norms.__getitem__, reverse=True):
        names.append(name)
        found += norms[name] ** 2
        if found > 0.999 * total:
            break
    return names


def measure(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Steps with a fresh optimizer whose step moves nothing, so that every arm computes of the same weights."""
    on_gpu = args.device.startswith("cuda")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0)
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(args.device)
    first, *rest = (capacity.step(model, args, [args.device], optimizer, i) for i in range(args.repeats + 1))
    peak = round(torch.cuda.max_memory_allocated(args.device) / 2**30, 2) if on_gpu else None
    return {"first_step_s": first, "seconds": rest, "allocated_GiB": peak}


def run(name: str, model: Any, args: argparse.Namespace, expected: Reference | None) -> tuple[Reference, Any]:
    said: list[str] = []
    record: dict[str, Any] = {"predicted_GiB": predicted(model, args, ARMS[name])}
    with Undo() as undo:
        ARMS[name].apply(model, undo, said.append)
        record |= measure(model, args)
        found = base.exact(model, args, args.device)
    model.zero_grad()
    record |= {"said": said} | (compare(found, expected) if expected is not None else {})
    return found, record


def line(name: str, record: dict[str, Any], eager: float) -> str:
    seconds = min(record["seconds"])
    text = (
        f"{name:16} {seconds:7.3f} s ({eager / seconds:.2f}x; first {record['first_step_s']:.1f})  "
        f"peak {record['allocated_GiB']} GiB, predicted {record['predicted_GiB']}"
    )
    if "loss" in record:
        text += (
            f"; {record['gradients_equal']} gradients equal, distance {record['distance']['farthest']:.4f} at most, "
            f"{record['distance']['middle']:.4f} in the middle, cosine {record['smallest_cosine']:.6f} at least, "
            f"{record['smallest_cosine_that_counts']:.6f} where the norm counts"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--arms", default=",".join(ARMS), help="eager comes first, always")
    for name, value in (
        ("layers", 40), ("dim", 5120), ("ffn-dim", 13824), ("heads", 40), ("text-dim", 4096), ("rank", 32),
        ("height", 480), ("width", 832), ("frames", 49), ("repeats", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = base.build(args, args.device)
    arms: dict[str, Any] = {}
    expected: Reference | None = None
    for name in dict.fromkeys(["eager", *args.arms.split(",")]):
        found, arms[name] = run(name, model, args, expected)
        expected = expected or found
        print(line(name, arms[name], min(arms["eager"]["seconds"])), flush=True)
        if args.json:
            args.json.write_text(json.dumps(base.environment(args) | {"arms": arms}, indent=1))


if __name__ == "__main__":
    main()
