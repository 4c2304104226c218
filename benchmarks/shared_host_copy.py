"""Two processes on one GPU that stream the 14B Wan transformer from one copy in host memory: what each of them holds.

    python benchmarks/shared_host_copy.py --json benchmarks/results/shared_host_copy_1xH200.json

Weights are random; the pipeline has `enable_model_cpu_offload()`. Calls are computed by one process, and by two that
share guidance; `--free` GiB of the GPU are left to them, so that both stream. Of each process: its resident host
memory, and its proportional share of it, in which a page that two processes map counts half for each. `pinned_GiB` are
pages that drivers have locked on the whole machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkout
import generate_arm
import psutil
import torch

import wanshim

VIDEOS = {"14B": (480, 832, 81), "tiny": (32, 32, 5)}  # height, width and frames


def timed(call: Callable[[], torch.Tensor | None]) -> dict[str, Any]:
    start = time.perf_counter()
    video = call()
    assert video is not None
    digest = hashlib.sha256(video.float().cpu().numpy()).hexdigest()[:12]
    return {"seconds": round(time.perf_counter() - start, 2), "frames": digest}


def host(process: int) -> dict[str, float]:
    """GiB of a process in host memory."""
    lines = (line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:])
    found = {words[0].rstrip(":"): int(words[1]) / 2**20 for words in lines}
    return {name: round(found[name], 2) for name in ("Rss", "Pss", "Pss_Anon", "Pss_Shmem")}


def pinned() -> float | None:
    found = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    if "nr_foll_pin_acquired" not in found:
        return None
    pages = int(found["nr_foll_pin_acquired"]) - int(found["nr_foll_pin_released"])
    return round(pages * 4096 / 2**30, 2)


def measure(job: generate_arm.Job, counts: list[int], free: float) -> list[dict[str, Any]]:
    rows = []
    pipe = generate_arm.pipeline(job, generate_arm.transformer(job).to("cpu"))
    call = partial(generate_arm.caller(job, pipe, decode=True), job.frames, job.steps)
    if job.device.type == "cuda":
        pipe.enable_model_cpu_offload()
        torch.cuda.empty_cache()
        held = torch.empty(int(torch.cuda.mem_get_info()[0] - free * 2**30), dtype=torch.uint8, device=job.device)
    for processes in counts:
        before = pinned()
        handle = wanshim.parallelize_pipeline(pipe, [str(pipe._execution_device)] * processes)
        calls = [timed(call) for _ in range(2)]
        own = [host(each.pid) for each in (psutil.Process(), *psutil.Process().children(recursive=True))]
        after = pinned()
        rows.append(
            {
                "processes": processes,
                "guidance_over": handle.plan.guidance,
                "worker_streams": handle.plan.streamed,
                "calls": calls,
                "host_GiB": own,
                "sum_of_Pss_GiB": round(sum(each["Pss"] for each in own), 2),
                "pinned_GiB": None if before is None or after is None else round(after - before, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        handle.remove()
    if job.device.type == "cuda":
        del held
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=VIDEOS, default="14B")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--free", type=float, default=24, help="GiB")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    job = generate_arm.Job("alone", given.model, *VIDEOS[given.model], steps=2, ranks=1, rank=0, folder="")
    rows = measure(job, given.processes, given.free)
    record = {**generate_arm.versions(), **checkout.state(), "model": given.model, "rows": rows}
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
