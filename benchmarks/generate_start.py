"""What starting the workers costs a user's script of two calls of two sizes, which knows nothing of wanshim.

    python -m wanshim generate --gpus 2 -- python benchmarks/generate_start.py --json start.json
    python benchmarks/generate_start.py       the same script alone: its frames and seconds

The weights are random and made on the device, so that the workers get less time to start in than while files are read.

    import_s, build_s      of diffusers, at whose import the workers start, and its pipeline; of the models
    waiting_MiB            that the driver counts for processes on the other GPUs before the first call
    call_s                 of each call, frames included
    start_s, weights_s     of them, waiting for the workers; until they have the weights, as in generate.py
    frames_sha256          of each call: the same alone and over several GPUs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkout
import generate_arm

SIZES = ((480, 832, 9), (720, 1280, 5))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=generate_arm.MODELS, default="14B")
    parser.add_argument("--sizes", nargs="+", metavar="HxWxF", default=["x".join(map(str, size)) for size in SIZES])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", metavar="PATH", help="write the record there")
    args = parser.parse_args(argv)
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    height, width, frames = sizes[0]
    job = generate_arm.Job("alone", args.model, height, width, frames, args.steps, 1, 0, "")

    record: dict[str, Any] = {"model": args.model, "steps": args.steps, "sizes": args.sizes, **checkout.state()}
    begun = time.perf_counter()
    from diffusers import WanPipeline  # noqa: F401  imported for its time

    record["import_s"] = time.perf_counter() - begun
    pipe = generate_arm.pipeline(job, generate_arm.transformer(job))
    generate_arm.synchronize()
    record["build_s"] = time.perf_counter() - begun - record["import_s"]
    record |= {"waiting_MiB": used_by_others(), "call_s": [], "frames_sha256": []}
    measured = generate_arm.watched_workers() if "wanshim.activation" in sys.modules else dict
    for height, width, frames in sizes:
        call = generate_arm.caller(replace(job, height=height, width=width), pipe, decode=True)
        begun = time.perf_counter()
        made = call(frames, args.steps)
        assert made is not None
        generate_arm.synchronize()
        record["call_s"].append(time.perf_counter() - begun)
        record["frames_sha256"].append(hashlib.sha256(made.float().cpu().numpy()).hexdigest())
    record |= measured() | generate_arm.versions()
    print(json.dumps(record, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def used_by_others() -> list[int]:
    """MiB that processes hold on each GPU but the first, as the driver counts them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()][1:]


if __name__ == "__main__":
    raise SystemExit(main())
