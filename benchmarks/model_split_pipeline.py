"""Pipelined micro-batches of the 14B Wan DiT over a split, against one GPU, in one run.

    python benchmarks/model_split_pipeline.py --devices cuda:0,cuda:1 --counts 2,4,8 --json pipeline.json

Model, shapes and LoRA as in model_split.py. Prints seconds for M micro-batches, the ratio to M times one
GPU's micro-batch, the bound M*S/(M+S-1), each GPU's peak and share of busy time, and a timeline. A last,
deterministic round compares losses and LoRA gradients with one micro-batch after the other, bit for bit.
`--offload` sends checkpoints to host memory, as `diffsynth.checkpoint_offload` does it; `--gib` leaves the split that
much of each card, by the allocator's limit. One GPU has neither.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base
import model_split_capacity as capacity
from diffsynth.pipelines import wan_video
from timeline import Timeline, draw

from wanshim.core.model_split import split_model
from wanshim.core.pipeline import Pipeline
from wanshim.core.pipeline.schedule import pipeline_bound
from wanshim.undo import Undo


def without_random_state() -> None:
    """Checkpoints as the feature runs them under pipeline: they leave the generators alone."""
    original = wan_video.gradient_checkpoint_forward

    def gradient_checkpoint_forward(model: Any, use: bool, offload: bool, *args: Any, **kwargs: Any) -> Any:
        return original(model, use, offload, *args, preserve_rng_state=False, **kwargs)

    wan_video.gradient_checkpoint_forward = gradient_checkpoint_forward


def sample(args: argparse.Namespace, home: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=home).manual_seed(seed)
    shape = (1, 16, (args.frames - 1) // 4 + 1, args.height // 8, args.width // 8)
    like = {"device": home, "dtype": torch.bfloat16, "generator": generator}
    return {
        "latents": torch.randn(shape, **like),
        "target": torch.randn(shape, **like),
        "context": torch.randn((1, 512, args.text_dim), **like),
        "timestep": torch.tensor([500.0 - seed], device=home, dtype=torch.bfloat16),
    }


def loss_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = dict(inputs)
    target = inputs.pop("target")
    output = wan_video.model_fn_wan_video(model, **inputs, use_gradient_checkpointing=True)
    return torch.nn.functional.mse_loss(output.float(), target.float())


def serial_round(model: Any, samples: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    losses = []
    for inputs in samples:
        loss = loss_of(model, inputs)
        loss.backward()
        losses.append(loss.detach())
    return losses


def pipeline_round(pipeline: Pipeline, model: Any, samples: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    losses = []
    for inputs in samples:
        pending = pipeline.submit(partial(loss_of, model, inputs), inputs)
        pipeline.backward(pending, torch.Tensor.backward)
        losses.append(pending)
    pipeline.join()
    return [loss.wait() for loss in losses]


def timed(model: Any, devices: list[str], work: Any, repeats: int) -> dict[str, Any]:
    cards = sorted({d for d in devices if d.startswith("cuda")})
    for card in cards:
        torch.cuda.reset_peak_memory_stats(card)
    seconds = []
    for _ in range(repeats):
        model.zero_grad()
        base.synchronize(devices)
        start = time.perf_counter()
        work()
        base.synchronize(devices)
        seconds.append(time.perf_counter() - start)
    peaks = {card: round(torch.cuda.max_memory_allocated(card) / 2**30, 2) for card in cards}
    reserved = {card: round(torch.cuda.max_memory_reserved(card) / 2**30, 2) for card in cards}
    return {"seconds": seconds, "median": statistics.median(seconds), "peak_GiB": peaks, "reserved_GiB": reserved}


def exact(model: Any, work: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.use_deterministic_algorithms(True)
    try:
        model.zero_grad()
        losses = [loss.item() for loss in work()]
    finally:
        torch.use_deterministic_algorithms(False)
    return losses, {name: p.grad.to("cpu", copy=True) for name, p in model.named_parameters() if p.grad is not None}


def traced(pipeline: Pipeline, work: Any) -> tuple[list[dict[str, Any]], list[float], str]:
    """Spans of one round, each stage's share of busy time, and the picture."""
    stages = pipeline.stages
    timeline = Timeline([*stages.streams, stages.side])
    stages.trace = timeline.trace
    work()
    spans = timeline.spans()
    stages.trace = None
    finish, count = max(span.end for span in spans), len(stages.streams)
    busy = [sum(s.end - s.begin for s in spans if s.stage == i) / finish for i in range(count)]
    return [vars(span) for span in spans], busy, draw(spans, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--counts", default="2,4,8")
    parser.add_argument("--exact", type=int, default=3, help="micro-batches of the comparison; 0 leaves it out")
    base.add_sizes(parser, repeats=1)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--gib", type=float)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    devices, counts = args.devices.split(","), [int(count) for count in args.counts.split(",")]
    home = devices[0]
    without_random_state()
    samples = [sample(args, home, seed) for seed in range(max([*counts, args.exact]))]

    model = base.build(args, home)
    serial_round(model, samples[:1])  # warm-up
    single = timed(model, [home], partial(serial_round, model, samples[:2]), 1)
    one = single["median"] / 2
    print(f"one GPU: {one:.3f} s a micro-batch, peak {single['peak_GiB']}", flush=True)
    if args.exact:
        expected = exact(model, partial(serial_round, model, samples[: args.exact]))
    handle = split_model(model, devices, exits=("head",))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(handle.plan, flush=True)
    if args.gib:
        capacity.limit(devices, args.gib)
    arm = capacity.Arm(offload=args.offload)
    predicted = capacity.predicted(model, handle, args, arm, in_flight=len(devices))
    record: dict[str, Any] = {"one_gpu": single, "plan": str(handle.plan), "predicted_GiB": predicted, "pipeline": {}}
    print(f"predicted peaks {predicted}", flush=True)
    with Undo() as undo:
        arm.put(model, undo, said := [])
        measure_pipeline(model, Pipeline(handle), devices, samples, args, record, expected if args.exact else None)
    record["said"] = said
    _write(args, record)


def measure_pipeline(
    model: Any, pipeline: Pipeline, devices: list[str], samples: list[dict[str, torch.Tensor]],
    args: argparse.Namespace, record: dict[str, Any], expected: Any,
) -> None:  # fmt: skip
    one, counts = record["one_gpu"]["median"] / 2, [int(count) for count in args.counts.split(",")]
    pipeline_round(pipeline, model, samples[: len(devices)])  # warm-up
    for count in counts:
        arm = timed(model, devices, partial(pipeline_round, pipeline, model, samples[:count]), args.repeats)
        arm["speed_up"] = one * count / arm["median"]
        arm["bound"] = pipeline_bound(len(devices), count)
        record["pipeline"][count] = arm
        print(
            f"M={count}: {arm['median']:.3f} s, {arm['speed_up']:.3f}x of one GPU (bound {arm['bound']:.2f}x), "
            f"peak {arm['peak_GiB']}, reserved {arm['reserved_GiB']}",
            flush=True,
        )
    work = partial(pipeline_round, pipeline, model, samples[: counts[-1] if len(counts) < 2 else counts[1]])
    record["spans"], record["busy"], picture = traced(pipeline, work)
    print(f"{picture}\nbusy {[round(share, 3) for share in record['busy']]}", flush=True)
    _write(args, record)  # the comparison takes longest: what was measured outlives it
    if expected is not None:
        found = exact(model, partial(pipeline_round, pipeline, model, samples[: args.exact]))
        equal = sum(torch.equal(expected[1][name], found[1][name]) for name in expected[1])
        record["losses_equal"], record["gradients_equal"] = expected[0] == found[0], f"{equal} of {len(expected[1])}"
        print(f"losses equal: {expected[0] == found[0]}; {equal} of {len(expected[1])} LoRA gradients bit for bit")


def _write(args: argparse.Namespace, record: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(record | base.environment(args), indent=1))


if __name__ == "__main__":
    main()
