"""One GPU's LoRA step of the 14B Wan DiT: as DiffSynth and FSDP2 run it, and with what wanshim can change.

    python benchmarks/training_step.py --device cuda:0 --json benchmarks/results/training_step_1xH200.json
    python benchmarks/training_step.py --device cpu --layers 4 --dim 64 --ffn-dim 96 --heads 2 --text-dim 32 --rank 4 \
        --height 64 --width 64 --frames 9

Model, shapes and LoRA as in model_split.py, with AdamW. Arms: DiffSynth's own step (eager); self-attention kept on the
GPU, or in host memory; "blocks": as many of the last blocks as fit are not computed again, or --kept-blocks of them;
blocks compiled; the base's products in eight bits; several of these together; those that "stream" with the allocator
held to --gib by `torch.cuda.set_per_process_memory_fraction`, checkpoints offloaded and as few blocks streamed as the
prediction takes to fit; and the peers of training_peers.py, of which DiffSynth's offload of layers is held to --gib.
Prints seconds a step (the fastest and all), the predicted peak beside the measured one and, but for the peers, of one
more step with deterministic kernels, how loss and LoRA gradients compare with eager: equal ones, the farthest by
norm, and the smallest cosine, of all and of those whose norm counts. An arm that fails is recorded with its error. The
record is written after each arm.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base
import model_split_capacity as capacity
import training_peers as peers

from wanshim import settings
from wanshim.adapters.diffsynth.checkpoint_offload import offload_checkpoints
from wanshim.adapters.diffsynth.compiled_blocks import compile_blocks
from wanshim.adapters.diffsynth.eight_bit_compute import compute_blocks
from wanshim.adapters.diffsynth.kept_attention import keep_attention
from wanshim.adapters.diffsynth.kept_blocks import keep_blocks
from wanshim.adapters.diffsynth.splitting.micro_batch import micro_batch
from wanshim.adapters.diffsynth.training_road import Row
from wanshim.core.shared.gpu_memory import ALLOCATOR_SHARE
from wanshim.core.shared.weight_bytes import num_bytes
from wanshim.core.strategy import (
    KeptOn,
    Limits,
    Request,
    Stored,
    Strategy,
    TrainingJob,
    TrainingPlan,
    available_on,
    store_of,
)
from wanshim.core.strategy.candidates import Candidate, StepSettings, with_kept_blocks
from wanshim.core.strategy.predict import Step, predict
from wanshim.core.streaming import stream_model
from wanshim.undo import Undo

Reference = tuple[float, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Arm:
    """What is changed of DiffSynth's step.

    Args:
        limited: the allocator is held to --gib.
        stream: checkpoints are offloaded, and as few blocks streamed as it takes to fit --gib.
        blocks: as many blocks as fit are not computed again, or --kept-blocks.
    """

    keep: KeptOn | None = None
    compile: bool = False
    compute: str | None = None
    peer: peers.Peer | None = None
    limited: bool = False
    stream: bool = False
    blocks: bool = False

    def apply(self, model: torch.nn.Module, args: argparse.Namespace, undo: Undo, report: Callable[[str], None]) -> Any:
        """The predicted peak in bytes, or None of a peer."""
        if self.peer is not None:
            return self.peer(model, args.device, undo)
        step = planned(model, args, self)
        peak = predict(step)[0].total
        if self.stream:
            peak = stream(model, args, peak, undo, report)
        if self.compute is not None:
            compute_blocks(SimpleNamespace(dit=model), self.compute, undo, report)
        if self.compile:
            compile_blocks(SimpleNamespace(dit=model), undo, Row.of(report))
        if self.stream:
            offload_checkpoints(undo, Row.of(report), every=True)
        if step.keep is not None:
            keep_attention(undo, Row.of(report), step.keep)
        if step.num_kept_blocks:
            run = StepSettings(chunk=None, offload=False, in_flight=1, num_kept_blocks=step.num_kept_blocks)
            plan = TrainingPlan(strategy=Strategy.RESIDENT, devices=step.devices, step=run)
            keep_blocks(undo, Row.of(report), plan, list(model.blocks))
        return peak


ARMS = {
    "eager": Arm(),
    "keep": Arm(keep=KeptOn.DEVICE),
    "keep on host": Arm(keep=KeptOn.HOST),
    "keep+blocks": Arm(keep=KeptOn.DEVICE, blocks=True),
    "compile": Arm(compile=True),
    "compile+keep": Arm(keep=KeptOn.DEVICE, compile=True),
    "compile+keep+blocks": Arm(keep=KeptOn.DEVICE, compile=True, blocks=True),
    "float8+keep": Arm(keep=KeptOn.DEVICE, compute="float8"),
    "float8+compile+keep": Arm(keep=KeptOn.DEVICE, compile=True, compute="float8"),
    "float8+compile+keep+blocks": Arm(keep=KeptOn.DEVICE, compile=True, compute="float8", blocks=True),
    "int8+compile+keep": Arm(keep=KeptOn.DEVICE, compile=True, compute="int8"),
    "stream+keep": Arm(keep=KeptOn.HOST, limited=True, stream=True),
    "stream+compile+keep": Arm(keep=KeptOn.HOST, compile=True, limited=True, stream=True),
    "stream+float8+compile+keep": Arm(keep=KeptOn.HOST, compile=True, compute="float8", limited=True, stream=True),
    "DiffSynth offload": Arm(peer=peers.checkpoints_offloaded),
    "FSDP2": Arm(peer=peers.sharded),
    "FSDP2 on host": Arm(peer=peers.sharded_on_host),
    "DiffSynth layers offload": Arm(peer=peers.layers_offloaded, limited=True),
    "DiffSynth int8 base": Arm(peer=peers.quantised),
}


def planned(model: Any, args: argparse.Namespace, arm: Arm) -> Step:
    """The step with the whole model on the GPU, as a plan predicts it."""
    pipe = SimpleNamespace(dit=model, torch_dtype=torch.bfloat16)
    tokens = ((args.frames - 1) // 4 + 1) * (args.height // 16) * (args.width // 16)
    blocks = tuple(store_of(block) for block in model.blocks)
    inside, everything = sum(blocks[1:], blocks[0]), store_of(model)
    home = Stored(everything.frozen - inside.frozen, everything.trained - inside.trained)
    work = micro_batch(pipe, tokens, None, graphs=int(arm.compile), compute=arm.compute)
    step = Step(blocks, home, (args.device,), (), work, offloading=arm.stream, keep=arm.keep)
    if not arm.blocks:
        return step
    if args.kept_blocks is not None:
        return replace(step, num_kept_blocks=(args.kept_blocks,))
    job = TrainingJob(
        devices=step.devices, split_points=None, blocks=blocks, home=home, video=None, micro_batch=lambda *_: work,
        request=Request(keep_blocks=True),
    )  # fmt: skip
    limits = Limits(available=available_on(step.devices), expandable_segments=settings.read().expandable_segments)
    run = StepSettings(chunk=None, offload=False, in_flight=1, keep=arm.keep)
    kept = with_kept_blocks(job, Candidate(strategy=Strategy.RESIDENT, settings=run, step=step), limits).step
    assert kept is not None  # as it was given
    return kept


def stream(model: Any, args: argparse.Namespace, peak: int, undo: Undo, report: Callable[[str], None]) -> int:
    """As few blocks as fit beside what a step needs besides weights; the peak that is then predicted, in bytes."""
    rest = peak - num_bytes(model)
    budget = int(args.gib * 2**30 * (1 - ALLOCATOR_SHARE)) - rest
    handle = stream_model(model, args.device, budget=budget, blocks="blocks")
    undo.add(handle.remove)
    report(str(handle.plan))
    return rest + handle.plan.device_bytes


@contextmanager
def limit(args: argparse.Namespace) -> Iterator[None]:
    if not args.device.startswith("cuda"):
        yield
        return
    capacity.limit([args.device], args.gib)
    try:
        yield
    finally:
        capacity.limit([args.device], float("inf"))


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


def measure(model: Any, args: argparse.Namespace, repeats: int) -> dict[str, Any]:
    """Steps with a fresh optimizer whose step moves nothing, so that every arm computes of the same weights."""
    on_gpu = args.device.startswith("cuda")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0)
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(args.device)
    first, *rest = (capacity.step(model, args, [args.device], optimizer, i) for i in range(repeats + 1))
    record: dict[str, Any] = {"first_step_s": first, "seconds": rest, "allocated_GiB": None, "reserved_GiB": None}
    if on_gpu:
        record["allocated_GiB"] = round(torch.cuda.max_memory_allocated(args.device) / 2**30, 2)
        record["reserved_GiB"] = round(torch.cuda.max_memory_reserved(args.device) / 2**30, 2)
    return record


def run(
    arm: Arm, model: Any, args: argparse.Namespace, record: dict[str, Any], expected: Reference | None, exact: bool
) -> Reference | None:
    """Fill the record; loss and gradients of a step with deterministic kernels, where `exact`."""
    said: list[str] = []
    found = None
    record["gib"] = args.gib if arm.limited else None
    try:
        with Undo() as undo:
            peak = arm.apply(model, args, undo, said.append)
            record["predicted_GiB"] = round(peak / 2**30, 2) if peak is not None else None
            with limit(args) if arm.limited else nullcontext():
                record |= measure(model, args, 1 if arm.peer else args.repeats)
            if exact:
                found = base.exact(model, args, args.device)
                record |= compare(found, expected) if expected is not None else {}
    finally:
        model.zero_grad()
        record["said"] = said
    return found


def line(name: str, record: dict[str, Any], eager: float) -> str:
    if "seconds" not in record:
        return f"{name:16} {record['error'].strip().splitlines()[-1]}"
    seconds = min(record["seconds"])
    text = (
        f"{name:16} {seconds:7.3f} s ({eager / seconds:.2f}x; first {record['first_step_s']:.1f})  "
        f"peak {record['allocated_GiB']} GiB, predicted {record['predicted_GiB']}, reserved {record['reserved_GiB']}"
    )
    if record["gib"]:
        text += f" of {record['gib']}"
    if "loss" in record:
        text += (
            f"; {record['gradients_equal']} gradients equal, distance {record['distance']['farthest']:.4f} at most, "
            f"{record['distance']['middle']:.4f} in the middle, cosine {record['smallest_cosine']:.6f} at least, "
            f"{record['smallest_cosine_that_counts']:.6f} where the norm counts"
        )
    return text + (f"; {record['error'].strip().splitlines()[-1]}" if "error" in record else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--arms", default=",".join(ARMS), help="eager comes first, always")
    base.add_sizes(parser, repeats=2)
    parser.add_argument("--gib", type=float, default=16.0, help="memory of the GPU, for arms that are held to it")
    parser.add_argument("--kept-blocks", type=int, help="not computed again; default: as many as fit")
    parser.add_argument("--exact", default=",".join(ARMS), help="arms that are compared with eager")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model: Any = None
    arms: dict[str, Any] = {}
    expected: Reference | None = None
    asked = dict.fromkeys(["eager", *args.arms.split(",")])
    for name in sorted(asked, key=lambda name: ARMS[name].peer is peers.sharded):  # torch never frees what it sharded
        arm = ARMS[name]
        model = model or base.build(args, args.device)
        arms[name] = {}
        try:
            exact = arm.peer is None and name in ("eager", *args.exact.split(","))
            found = run(arm, model, args, arms[name], expected, exact)
            expected = expected or found
        except Exception as error:
            arms[name]["error"] = "".join(traceback.format_exception(error))
        if arm.peer in peers.SPOILING:
            model = None
        print(line(name, arms[name], min(arms["eager"]["seconds"])), flush=True)
        if args.json:
            args.json.write_text(json.dumps(base.environment(args) | {"arms": arms}, indent=1))


if __name__ == "__main__":
    main()
