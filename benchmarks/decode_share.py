"""What share of a call of diffusers' WanPipeline its decode has, on one GPU, by model, size and steps.

    python benchmarks/decode_share.py --json benchmarks/results/decode_share_1xH200.json
    python benchmarks/decode_share.py --models tiny --sizes 64x64x9 --steps 2        on a CPU

Weights are random (there is nothing to download); prompts are given as embeddings, so that no text encoder counts. The
time of a step is the median of those after the first, which has what comes before it too. A call is its steps and the
decode. Decodes are timed by themselves, after two calls: diffusers' own, and wanshim's by strict and fast operators.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import checkout
import generate_arm
import torch

from wanshim.core.decoding import parallelize_decode


def seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    taken = []
    for _ in range(repeats):
        generate_arm.synchronize()
        begun = time.perf_counter()
        work()
        generate_arm.synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


@torch.no_grad()
def rows(model: str, size: str, steps: list[int], repeats: int) -> list[dict[str, Any]]:
    height, width, frames = map(int, size.split("x"))
    job = generate_arm.Job("alone", model, height, width, frames, repeats, ranks=1, rank=0, folder="")
    pipe = generate_arm.pipeline(job, generate_arm.transformer(job))
    call_of = generate_arm.caller(job, pipe, decode=False)
    clock = generate_arm.Clock(generate_arm.Arm(pipe.scheduler, call_of, generate_arm.own_peak))
    clock.call(generate_arm.WARM_FRAMES, 1)
    first, *others = clock.call(frames, 1 + repeats)["step_seconds"]
    shape = (1, 16, (frames - 1) // 4 + 1, height // 8, width // 8)
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(job.device, job.dtype)
    found = {"decode": decode(pipe.vae, latent)}
    for name in ("strict", "fast"):
        handle = parallelize_decode(pipe.vae, strict=name == "strict")
        handle.wait_for_kernels()
        found[name] = decode(pipe.vae, latent)
        handle.remove()
    made = []
    for count in steps:
        call = first + (count - 1) * statistics.median(others) + found["decode"]
        made.append({"model": model, "size": size, "steps": count, "seconds": {"call": call, **found}})
        share = found["decode"] / call
        print(f"{model} {size} {count} steps: {call:.2f} s, decode {found['decode']:.2f} s, {share:.1%}", flush=True)
    return made


def decode(vae: Any, latent: torch.Tensor) -> float:
    def once() -> None:
        vae.decode(latent)

    seconds(once, repeats=2)
    return seconds(once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1.3B,14B")
    parser.add_argument("--sizes", default="480x832x81,720x1280x81")
    parser.add_argument("--steps", default="4,20,50")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are timed, after the first")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    steps = [int(count) for count in args.steps.split(",")]
    made = [
        row
        for model, size in product(args.models.split(","), args.sizes.split(","))
        for row in rows(model, size, steps, args.repeats)
    ]
    if args.json:
        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
        record = {"benchmark": "decode_share", "gpu": gpu, "torch": torch.__version__, **checkout.state(), "rows": made}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
