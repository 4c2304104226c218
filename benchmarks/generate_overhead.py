"""Costs of a shared pipeline's call beside its forwards: a small video, alone and by two processes on one GPU.

    python benchmarks/generate_overhead.py --json benchmarks/results/generate_overhead_1xH200.json

Weights are random. Two processes on one GPU gain nothing: what the calls take longer is the comparison of the models
with their copies, the plan, and what travels between the processes. The first call, which starts the second process
and sends it the weights without NCCL, is not listed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import checkout
import generate_arm
import torch

import wanshim

CALLS = 8
VIDEO, STEPS = (128, 128, 5), 4


def seconds(pipe: object, job: generate_arm.Job) -> list[float]:
    """Seconds of the calls behind the first."""
    call, found = generate_arm.caller(job, pipe, decode=True), []
    for _ in range(1 + CALLS):
        generate_arm.synchronize()
        start = time.perf_counter()
        call(job.frames, job.steps)
        generate_arm.synchronize()
        found.append(time.perf_counter() - start)
    return found[1:]


def measure(model: str) -> dict[str, object]:
    job = generate_arm.Job("alone", model, *VIDEO, STEPS, 1, 0, "")
    pipe = generate_arm.pipeline(job, generate_arm.transformer(job))
    alone = seconds(pipe, job)
    handle = wanshim.parallelize_pipeline(pipe, [str(pipe.device)] * 2)
    shared = seconds(pipe, job)
    handle.remove()
    return {
        "model": model,
        "alone_s": statistics.median(alone),
        "shared_s": statistics.median(shared),
        "calls_alone_s": alone,
        "calls_shared_s": shared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=generate_arm.MODELS, default=["1.3B", "14B"])
    parser.add_argument("--json", metavar="PATH", help="write the record there")
    args = parser.parse_args()
    rows = []
    for model in args.models:
        rows.append(measure(model))
        print(json.dumps(rows[-1]), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if args.json:
        machine = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "", "torch": torch.__version__}
        record = {**machine, "video": list(VIDEO), "steps": STEPS, "rows": rows, **checkout.state()}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
