"""Streamed frozen weights under DDP, and checkpoint offload, for the 14B Wan DiT, with their peers in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/model_split_streaming.py --json streaming.json

Model, shapes and LoRA as in model_split.py; accumulation 1, one sample a rank and step. First on one GPU:
no offload, wanshim's checkpoint offload, torch's `save_on_cpu` (what DiffSynth's option uses). Then over all
ranks: DDP with the whole base resident, and DDP with half of the blocks streamed from host memory. A
deterministic step of each pair compares loss and every LoRA gradient bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base
import torch.utils.checkpoint
from diffsynth.pipelines import wan_video
from model_split_pipeline import sample
from torch.nn.parallel import DistributedDataParallel

from wanshim.core.offload import CheckpointOffload
from wanshim.core.streaming import LocalRanks, stream_model

Saving = Callable[[], AbstractContextManager[Any]]


class Trained(torch.nn.Module):
    """What DDP wraps: a sample in, its loss out."""

    def __init__(self, model: Any, saving: Saving = nullcontext) -> None:
        super().__init__()
        self.model = model
        self.saving = saving

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = dict(inputs)
        target = inputs.pop("target")
        offload = self.saving is not nullcontext
        output = wan_video.model_fn_wan_video(
            self.model, **inputs, use_gradient_checkpointing=True, use_gradient_checkpointing_offload=offload
        )
        return torch.nn.functional.mse_loss(output.float(), target.float())


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", self.rank) if args.device == "cuda" else torch.device("cpu")
        self.save_on_cpu = torch.autograd.graph.save_on_cpu
        self.record: dict[str, Any] = {}

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - START:5.0f} s] {text}", flush=True)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self, module: Any, seed: int) -> torch.Tensor:
        saving = (module.module if isinstance(module, DistributedDataParallel) else module).saving
        torch.autograd.graph.save_on_cpu = self.save_on_cpu if saving is nullcontext else saving
        loss = module(sample(self.args, str(self.device), seed * self.world + self.rank))
        loss.backward()
        torch.autograd.graph.save_on_cpu = self.save_on_cpu
        return loss.detach()

    def timed(self, module: Any, title: str, repeats: int, together: bool) -> dict[str, Any]:
        """Seconds a step of each repeat, after one that warms up; with all ranks in step where `together`."""
        seconds = []
        for i in range(repeats + 1):
            module.zero_grad()
            if i == 1 and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self.synchronize()
            if together:
                dist.barrier()
            begin = time.perf_counter()
            self.step(module, i)
            self.synchronize()
            seconds.append(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else 0.0
        arm = {"first": seconds[0], "seconds": seconds[1:], "median": statistics.median(seconds[1:]), "peak_GiB": peak}
        self.say(f"{title}: {arm['median']:.3f} s a step (first {seconds[0]:.2f}), peak {peak:.2f} GiB")
        self.record[title] = arm
        self.keep()
        return arm

    def keep(self) -> None:
        """Write what there is so far."""
        if self.args.json and self.rank == 0:
            self.args.json.write_text(json.dumps(self.record | base.environment(self.args), indent=1))

    def exact(self, module: Any) -> list[torch.Tensor]:
        """Loss and gradients of one step with deterministic kernels."""
        torch.use_deterministic_algorithms(True)
        try:
            module.zero_grad()
            loss = self.step(module, 99)
        finally:
            torch.use_deterministic_algorithms(False)
        return [loss.cpu(), *(p.grad.cpu() for p in module.parameters() if p.grad is not None)]

    def compare(self, what: str, expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
        equal = sum(map(torch.equal, expected, found))
        self.record[what] = f"{equal} of {len(expected)}"
        self.keep()
        self.say(f"{what}: {equal} of {len(expected)} equal bit for bit")
        assert len(expected) == len(found)


def one_gpu(bench: Bench, model: Any) -> float:
    """The offload's arms, on the first rank alone."""
    plain, args = Trained(model), bench.args
    one = bench.timed(plain, "one GPU, nothing offloaded", args.repeats, together=False)
    offload = CheckpointOffload(min_bytes=2**20 if bench.device.type == "cuda" else 0)
    ours = bench.timed(Trained(model, offload.saving), "one GPU, wanshim's offload", args.repeats, together=False)
    bench.record["offload_count"] = vars(offload.count) | {"host_GiB": offload.host_bytes / 2**30}
    bench.say(f"  {offload.count}, host {offload.host_bytes / 2**30:.2f} GiB")
    if args.exact:
        bench.compare("offload, loss and gradients", bench.exact(plain), bench.exact(Trained(model, offload.saving)))
    offload.clear()
    peer = bench.timed(Trained(model, bench.save_on_cpu), "one GPU, save_on_cpu", 1, together=False)
    bench.record["offload_to_none"] = ours["median"] / one["median"]
    bench.record["save_on_cpu_to_none"] = peer["median"] / one["median"]
    bench.say(
        f"offload / none {ours['median'] / one['median']:.4f}, save_on_cpu / none {peer['median'] / one['median']:.4f}"
    )
    model.zero_grad()
    return float(one["median"])


def all_ranks(bench: Bench, model: Any, one: float) -> None:
    """DDP, resident and streamed."""
    args, cuda = bench.args, bench.device.type == "cuda"
    devices = {"device_ids": [bench.rank]} if cuda else {}
    trained = Trained(model)
    resident = DistributedDataParallel(trained, **devices)
    whole = bench.timed(resident, "DDP, base resident", args.repeats, together=True)
    expected = bench.exact(resident) if args.exact else []
    del resident
    begin = time.perf_counter()
    handle = stream_model(
        model, bench.device, count=args.layers // 2, host=LocalRanks.of_process_group(bench.rank, bench.world)
    )
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    bench.record["setup_seconds"] = {"all": time.perf_counter() - begin, **handle.seconds}
    bench.say(
        f"{handle.plan}\n  set up: " + ", ".join(f"{k} {v:.1f} s" for k, v in bench.record["setup_seconds"].items())
    )
    bench.record["plan"] = str(handle.plan)
    trained._ddp_params_and_buffers_to_ignore = [f"model.{name}" for name in handle.waiting]
    streamed = DistributedDataParallel(trained, **devices)
    handle.ring.timed = []
    half = bench.timed(streamed, "DDP, half streamed", args.repeats, together=True)
    bench.record["link"] = link_of(handle.ring)
    bench.say(f"  link {bench.record['link']}")
    handle.ring.timed = None
    if args.exact:
        bench.compare("streamed DDP, loss and gradients", expected, bench.exact(streamed))
    samples_per_second = bench.world / half["median"]
    bench.record["streamed_to_resident_DDP"] = half["median"] / whole["median"]
    bench.record["per_sample_gain_over_one_GPU"] = samples_per_second * one
    bench.say(f"streamed / resident DDP {half['median'] / whole['median']:.4f}")
    bench.say(f"{bench.world} GPUs streaming: {samples_per_second * one:.3f}x of one resident GPU per sample")
    bench.keep()


def link_of(ring: Any) -> dict[str, Any]:
    speeds = [size / (begun.elapsed_time(ended) / 1e3) / 1e9 for begun, ended, size in ring.timed or []]
    return vars(ring.count) | {"GB_per_s": [round(speed, 1) for speed in sorted(speeds)][:: max(len(speeds) // 8, 1)]}


def peer_link() -> float | None:
    """GB/s from the second GPU to the first, for comparison with the host's."""
    if torch.cuda.device_count() < 2:
        return None
    there, here = (torch.empty(2**28, dtype=torch.uint8, device=f"cuda:{i}") for i in (1, 0))
    times = []
    for _ in range(4):
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        begin = time.perf_counter()
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        times.append(time.perf_counter() - begin)
    return 2**28 / min(times) / 1e9


START = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--exact", type=int, default=1, help="0 leaves the comparison bit for bit out")
    parser.add_argument("--parts", default="offload,stream")
    base.add_sizes(parser, repeats=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo beside NCCL: ranks that wait for one at work must not keep a GPU busy
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", timeout=timedelta(seconds=200))
    bench = Bench(args)
    model = base.build(args, str(bench.device))
    bench.say("model built")
    done = torch.zeros(1, dtype=torch.float64)
    if bench.rank == 0:
        peer = peer_link() if args.device == "cuda" else None
        bench.record["speeds"] = {"peer_GB_s": peer}
        bench.say(f"peer GPU {peer and round(peer, 1)} GB/s")
        if "offload" in args.parts:
            done[0] = one_gpu(bench, model)
        else:
            done[0] = bench.timed(Trained(model), "one GPU, nothing offloaded", args.repeats, together=False)["median"]
            model.zero_grad()
    dist.broadcast(done, 0)
    if "stream" in args.parts:
        all_ranks(bench, model, done.item())
    bench.keep()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
