"""A training step of the 14B Wan DiT on two cards with less memory, stood in for by the allocator's limit.

    python benchmarks/model_split_capacity.py --base bf16 --gib 22.0 --json benchmarks/results/capacity_bf16.json

Model, shapes and LoRA as in model_split.py, with AdamW. Arms: the plain split; checkpoints offloaded to host memory, as
`diffsynth.checkpoint_offload` does it; the norms and rotary embedding in chunks of tokens; these and the feed-forward
network. First without a limit, then those of --limited with `torch.cuda.set_per_process_memory_fraction` at --gib.
Prints seconds a step, each device's predicted peak beside the measured one (allocated, and reserved), and how loss and
LoRA gradients compare with the plain split. The record is written after each arm.
`--base fp8` stores the frozen linear weights as float8_e4m3 (torchao, weight only).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base

from wanshim.adapters.diffsynth.checkpoint_offload import offload_checkpoints
from wanshim.adapters.diffsynth.splitting import micro_batch
from wanshim.adapters.diffsynth.training_road import Row
from wanshim.core.model_split import split_model
from wanshim.core.strategy import CHUNK_TOKENS, MicroBatch, store_of
from wanshim.core.strategy.predict import Step, predict
from wanshim.undo import Undo


def quantize(model: torch.nn.Module) -> None:
    """The frozen linear weights of the blocks as fp8; LoRA as it is."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model.blocks, Float8WeightOnlyConfig(), lambda m, name: type(m) is torch.nn.Linear and "lora" not in name)


def step(model: Any, args: argparse.Namespace, devices: list[str], optimizer: Any, seed: int) -> float:
    base.synchronize(devices)
    start = time.perf_counter()
    base.micro_batch(model, args, devices[0], seed)
    optimizer.step()
    optimizer.zero_grad()
    base.synchronize(devices)
    return time.perf_counter() - start


def measure(model: Any, args: argparse.Namespace, devices: list[str]) -> dict[str, Any]:
    """Steps with a fresh optimizer whose step moves nothing, so that every arm computes of the same weights."""
    cards = sorted({d for d in devices if d.startswith("cuda")})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0)
    gc.collect()
    for card in cards:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(card)
    seconds = [step(model, args, devices, optimizer, i) for i in range(args.repeats + 1)]
    return {
        "seconds": seconds[1:],
        "allocated_GiB": {card: round(torch.cuda.max_memory_allocated(card) / 2**30, 2) for card in cards},
        "reserved_GiB": {card: round(torch.cuda.max_memory_reserved(card) / 2**30, 2) for card in cards},
    }


def predicted(model: Any, handle: Any, args: argparse.Namespace, arm: Arm, in_flight: int = 1) -> dict[str, float]:
    pipe = SimpleNamespace(dit=model, torch_dtype=torch.bfloat16)
    tokens = ((args.frames - 1) // 4 + 1) * (args.height // 16) * (args.width // 16)
    with Undo() as undo:
        arm.chunks(model.blocks[0], undo)
        work: MicroBatch = micro_batch.micro_batch(pipe, tokens, None)
    blocks = tuple(store_of(block) for block in model.blocks)
    inside, everything = sum(blocks[1:], blocks[0]), store_of(model)
    home = type(inside)(everything.frozen - inside.frozen, everything.trained - inside.trained)
    plan = handle.plan
    peaks = predict(Step(blocks, home, plan.devices, plan.split_at, work, in_flight, offloading=arm.offload))
    return {peak.device: round(peak.total / 2**30, 2) for peak in peaks}


def compare(expected: Any, found: Any) -> dict[str, Any]:
    worst = max(
        float((expected[1][n].float() - g.float()).norm() / expected[1][n].float().norm().clamp_min(1e-30))
        for n, g in found[1].items()
    )
    equal = sum(torch.equal(expected[1][name], g) for name, g in found[1].items())
    return {
        "loss": [expected[0], found[0]],
        "gradients_equal": f"{equal} of {len(found[1])}",
        "worst_relative_difference": worst,
    }


def no_chunks(block: Any, undo: Undo) -> None:
    pass


@dataclass(frozen=True)
class Arm:
    """A way to take the steps. `chunks` puts one block's in."""

    chunks: Callable[[Any, Undo], None] = no_chunks
    offload: bool = False

    def put(self, model: Any, undo: Undo, said: list[str]) -> None:
        for block in model.blocks:
            self.chunks(block, undo)
        if self.offload:
            offload_checkpoints(undo, Row.of(said.append), every=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--base", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--gib", type=float, default=22.0, help="memory of each card")
    parser.add_argument("--arms", default="plain,offload,norms and rotary,all chunks")
    parser.add_argument("--limited", default="plain,offload")
    parser.add_argument("--json", type=Path)
    base.add_sizes(parser, repeats=2, chunk=CHUNK_TOKENS)
    args = parser.parse_args()
    devices = args.devices.split(",")

    def exact_parts(block: Any, undo: Undo) -> None:
        micro_batch.chunk_block(block, args.chunk, undo, micro_batch.NORMS)
        micro_batch.chunk_rope(args.chunk, undo)

    def everything(block: Any, undo: Undo) -> None:
        micro_batch.chunk_block(block, args.chunk, undo)
        micro_batch.chunk_rope(args.chunk, undo)

    model = base.build(args, devices[0])
    if args.base == "fp8":
        quantize(model)
    handle = split_model(model, devices, exits=("head",))
    print(handle.plan, flush=True)
    known = {
        "plain": Arm(),
        "offload": Arm(offload=True),
        "norms and rotary": Arm(exact_parts),
        "all chunks": Arm(everything),
    }
    record = base.environment(args) | {"plan": str(handle.plan), "arms": {}}
    expected = None
    for title in args.arms.split(","):
        said: list[str] = []
        with Undo() as undo:
            known[title].put(model, undo, said)
            arm = measure(model, args, devices)
            found = base.exact(model, args, devices[0])
        model.zero_grad()
        arm["predicted_GiB"] = predicted(model, handle, args, known[title])
        expected = expected or found
        arm["against_plain"] = compare(expected, found)
        arm |= {"said": said} if said else {}
        keep(record, title, arm, args)
    if devices[0].startswith("cuda"):
        limit(devices, args.gib)
        for title in args.limited.split(","):
            keep(record, f"{title} within {args.gib} GiB", limited(model, args, devices, known[title]), args)


def keep(record: dict[str, Any], title: str, arm: Any, args: argparse.Namespace) -> None:
    """Print an arm, and write what there is so far."""
    record["arms"][title] = arm
    print(title, json.dumps(arm), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))


def limit(devices: list[str], gib: float) -> None:
    """From now on this process may hold no more than that on each card."""
    gc.collect()
    torch.cuda.empty_cache()
    for device in set(devices):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(gib * 2**30 / total, 1.0), device)


def limited(model: Any, args: argparse.Namespace, devices: list[str], arm: Arm) -> Any:
    """Steps under the limit, or the error."""
    with Undo() as undo:
        arm.put(model, undo, [])
        try:
            return measure(model, args, devices)
        except torch.OutOfMemoryError as error:
            return str(error).split(". ")[0]
        finally:
            model.zero_grad()


if __name__ == "__main__":
    main()
