"""What starting the workers costs a user's script of two calls of two sizes, which knows nothing of wanshim.

    python -m wanshim generate --gpus 2 -- python benchmarks/generate_start.py --json start.json
    python benchmarks/generate_start.py       the same script alone: its frames and seconds

The weights are random and made on the device, so that the workers get less time to start in than while files are read.

    import_s, build_s      of diffusers, at whose import the workers start, and its pipeline; of the models
    waiting_MiB            that the driver counts for processes on the other GPUs before the first call
    call_s                 of each call, frames included: one for each size, and a second one of the last size
    parts_s                of each call, by part; a part is without those within it, and the GPU is waited for between
                           them. `step N` and `decode` are what is in no other part until that step ends, and after it
    start_s, weights_s     of the calls, waiting for the workers; until they have the weights, as in generate.py
    frames_sha256          of each call: the same alone and over several GPUs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import threading
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
    record |= {"waiting_MiB": used_by_others(), "call_s": [], "parts_s": [], "frames_sha256": []}
    by_wanshim = "wanshim.activation" in sys.modules
    measured = generate_arm.watched_workers() if by_wanshim else dict
    parts = Parts(pipe.scheduler, args.steps)
    if by_wanshim:
        watch_wanshim(parts)
    for height, width, frames in [*sizes, sizes[-1]]:
        call = generate_arm.caller(replace(job, height=height, width=width), pipe, decode=True)
        parts.begin()
        made = call(frames, args.steps)
        assert made is not None
        record["parts_s"].append(parts.end())
        record["call_s"].append(sum(record["parts_s"][-1].values()))
        record["frames_sha256"].append(hashlib.sha256(made.float().cpu().numpy()).hexdigest())
    record |= measured() | generate_arm.versions()
    print(json.dumps(record, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


class Parts:
    """Seconds of a call by part, from `begin` to `end`; of one thread.

    Args:
        scheduler: whose `step` the pipeline calls once a step.
        steps: of each call.
    """

    def __init__(self, scheduler: Any, steps: int) -> None:
        self._scheduler_step, self._steps = scheduler.step, steps
        scheduler.step = self._step

    def begin(self) -> None:
        self._seconds: dict[str, float] = {}
        self._done, self._within = 0, ["step 1"]
        self._change()

    def end(self) -> dict[str, float]:
        self._spent()
        return self._seconds

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count each call of `owner.name` as this part."""
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return own(*args, **kwargs)
            self._spent()
            self._within.append(part)
            self._change()
            try:
                return own(*args, **kwargs)
            finally:
                self._spent()
                self._within.pop()
                self._change()

        setattr(owner, name, call)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        result = self._scheduler_step(*args, **kwargs)
        self._spent()
        self._done += 1
        self._within[0] = f"step {self._done + 1}" if self._done < self._steps else "decode"
        self._change()
        return result

    def _change(self) -> None:
        self._since = time.perf_counter()

    def _spent(self) -> None:
        generate_arm.synchronize()
        part = self._within[-1]
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - self._since


def watch_wanshim(parts: Parts) -> None:
    """What it does in a call beside the forwards."""
    from wanshim.core.decoding import ParallelVae
    from wanshim.core.generation import together
    from wanshim.core.generation.shared_pipeline import SharedPipeline, _Call
    from wanshim.core.workers import pool

    for owner, name, part in (
        (SharedPipeline, "begin", "check"),  # whether the pipeline can be shared
        (_Call, "_decide", "plan"),
        (SharedPipeline, "working_bytes", "plan: trace"),
        (pool.Workers, "hold", "recheck: send"),
        (pool.Workers, "_wait_for_start", "start"),
        (pool, "pack", "recheck: structure"),  # and what a call is given
        (pool.Workers, "call", "forward: send"),
        (pool.Workers, "_result", "forward: wait"),  # behind this process's own
        (pool, "digests", "recheck: digests"),
        (together, "of", "decode: VAE"),
        (ParallelVae, "_agree", "decode: agree"),
        (ParallelVae, "_execute", "decode: compute"),
        (ParallelVae, "_is_equal", "decode: compare"),
    ):
        parts.watch(owner, name, part)


def used_by_others() -> list[int]:
    """MiB that processes hold on each GPU but the first, as the driver counts them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()][1:]


if __name__ == "__main__":
    raise SystemExit(main())
