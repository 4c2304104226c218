"""Wan and Qwen-Image VAE decode on 1 to N GPUs, wanshim against its peers in the same run.

    python benchmarks/vae_decode.py --ranks 1,2,4 --layouts 2.1 --peers --out benchmarks/results/vae_decode_2.1.json
    python benchmarks/vae_decode.py --ranks 1,2,4 --layouts qwen-image --out benchmarks/results/vae_decode_image.json

Weights are random and the same on every rank (there is nothing to download); shapes are the real ones. Each arm is
decoded twice to warm up (a strict decode compares in the first and compiles in the second what it found equal), then
`--repeats` times between barriers; the time is the slowest rank's, the median of the repeats. Peak memory is what the
decode adds on each rank, next to what the plan predicted. Peers take part where they can be imported: diffusers (the
reference) must be, vLLM-Omni's decoders may be.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import checkout
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from wanshim.cli import warm
from wanshim.core.decoding import parallelize_decode

LAYOUTS: dict[str, dict[str, Any]] = {
    "2.1": {"config": {}, "latent": (1, 16, 21, 88, 160)},
    "2.2": {
        "config": warm.LAYOUTS["2.2"].config,
        "latent": (1, 48, 31, 44, 80),
    },
    "qwen-image": {"class": "AutoencoderKLQwenImage", "config": {}, "latent": (1, 16, 1, 256, 256)},  # 2048x2048
}
SMALL = {"2.1": (1, 16, 3, 8, 12), "2.2": (1, 48, 3, 6, 8), "qwen-image": (1, 16, 1, 8, 12)}


@dataclass
class Row:
    """One arm's result; seconds of the slowest rank (`first`: of rank 0's warm-up), GiB added per rank."""

    layout: str
    arm: str
    ranks: int
    seconds: float = 0.0
    spread: float = 0.0
    first: float = 0.0
    peak: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    max_diff: float | None = None
    psnr: float | None = None
    note: str = ""


class Bench:
    """One rank's side of the run."""

    title = "Wan and Qwen-Image VAE decode"

    def __init__(self, rank: int, size: int, args: argparse.Namespace) -> None:
        self.rank, self.size, self.args = rank, size, args
        self.device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        self.groups = {n: dist.new_group(list(range(n))) for n in args.ranks if 1 < n <= size}
        self.rows: list[Row] = []
        self.reference: torch.Tensor | None = None
        self.end = time.monotonic() + args.seconds

    def layout(self, layout: str) -> None:
        latent = self.on_one_vae(layout)
        if self.args.peers and "class" not in LAYOUTS[layout]:  # the peers have Wan's
            self.peers(layout, latent)

    def on_one_vae(self, layout: str) -> torch.Tensor:
        """The arms that share diffusers' VAE; it is gone when the peers make theirs."""
        vae, latent = self.make(layout)
        self.reference = None
        self.tell(self.arm(layout, "diffusers untiled", 1, lambda: self.call(vae, latent)))
        for ranks in self.args.ranks:
            for name, options in self.own_arms(ranks, image=latent.shape[2] == 1).items():
                self.own(layout, name, ranks, vae, latent, options)
        vae.enable_tiling()
        self.tell(self.arm(layout, "diffusers tiled", 1, lambda: self.call(vae, latent)))
        vae.disable_tiling()
        return latent

    parallelize = staticmethod(parallelize_decode)

    @staticmethod
    def call(vae: Any, given: torch.Tensor) -> Any:
        return vae.decode(given).sample

    def own_arms(self, ranks: int, image: bool) -> dict[str, dict[str, Any]]:
        if ranks == 1:
            arms = {f"wanshim fast, chunk {n}": {"strict": False, "chunk": n} for n in self.args.chunks}
            return {"wanshim strict": {}, "wanshim fast": {"strict": False}, **arms}
        if image:
            return {
                "wanshim spatial strict": {"mode": "spatial"},
                "wanshim spatial": {"mode": "spatial", "strict": False},
                "wanshim tile": {"mode": "tile", "strict": False},
            }
        return {
            "wanshim temporal strict": {"mode": "temporal"},
            "wanshim temporal": {"mode": "temporal", "strict": False},
            "wanshim spatial": {"mode": "spatial", "strict": False},
            "wanshim tile": {"mode": "tile", "strict": False},
            "wanshim auto, one rank, uint8": {"strict": False, "output": 0, "uint8": True},
        }

    def own(self, layout: str, name: str, ranks: int, vae: Any, latent: torch.Tensor, options: dict[str, Any]) -> None:
        if not self.selected(name):
            return
        handle = None
        if self.rank < ranks:
            group = self.groups[ranks] if ranks > 1 else dist.new_group([0], use_local_synchronization=True)
            handle = self.parallelize(vae, group, deadline=60.0, **options)
            handle.wait_for_kernels(latent.shape)
        row = self.arm(layout, name, ranks, lambda: self.call(vae, latent))
        if handle is not None:
            if row is not None and handle.plan is not None:
                row.predicted = [peak / 2**30 for peak in handle.plan.peak[:ranks]]
                row.note = row.note or str(handle.plan).splitlines()[0]
            handle.remove()
        self.tell(row)

    def peers(self, layout: str, latent: torch.Tensor) -> None:
        for name in ("vllm_omni_peer", "cache_dit_peer"):
            try:
                peer = importlib.import_module(name)
            except ImportError as error:
                self.rows.append(Row(layout=layout, arm=name, ranks=0, note=f"not installed: {error}"))
                continue
            for arm, one in peer.ARMS.items():
                for ranks in self.args.ranks:
                    if (ranks == 1) == one and self.selected(arm):
                        self.peer(peer, arm, layout, ranks, latent)

    def peer(self, peer: Any, arm: str, layout: str, ranks: int, latent: torch.Tensor) -> None:
        decode: Callable[[], Any] = lambda: None  # noqa: E731
        if self.rank < ranks:
            config = LAYOUTS[layout]["config"]
            vae = peer.make(arm, config, self.device, self.dtype, self.groups.get(ranks), ranks)
            decode = lambda: vae.decode(latent).sample  # noqa: E731
        self.tell(self.arm(layout, arm, ranks, decode))

    def arm(self, layout: str, name: str, ranks: int, decode: Callable[[], Any]) -> Row | None:
        if not self.selected(name):
            return None
        row = Row(layout=layout, arm=name, ranks=ranks)
        if self.out_of_time():
            row.note = "skipped: the run's time is up"
            self.rows.append(row)
            return None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        seconds, peak, failure = self.measure(ranks, decode, row)
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, (seconds, peak, failure))
        told = told[:ranks]
        failures = [each[2] for each in told if each[2]]
        if failures:
            row.note = failures[0]
        else:
            slowest = [max(times) for times in zip(*(each[0] for each in told))]
            row.seconds, row.spread = statistics.median(slowest), max(slowest) - min(slowest)
        row.peak = [each[1] for each in told]
        self.rows.append(row)
        return row

    @torch.no_grad()
    def measure(self, ranks: int, decode: Callable[[], Any], row: Row) -> tuple[list[float], float, str]:
        seconds: list[float] = []
        peak, failure, out = 0.0, "", None
        slow = "diffusers tiled" in row.arm  # once, without a warm-up: it takes the longest, and warms up within itself
        for repeat in range(0 if slow else -2, 1 if slow else self.args.repeats):
            self.sync()
            if self.rank >= ranks or failure:
                continue
            del out
            out = None
            before = self.reset_peak()
            start = time.perf_counter()
            try:
                out = decode()
            except Exception as error:  # an arm that fails is a row, not the end of the run
                failure = f"{type(error).__name__}: {str(error)[:300]}"
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - start
            if repeat == -2:
                row.first = took
            elif repeat >= 0:
                seconds.append(took)
                peak = max(peak, self.peak(before))
        if self.rank == 0 and out is not None:
            self.compare(row, out)
        return seconds, peak, failure

    def tell(self, row: Row | None) -> None:
        if self.rank == 0 and row is not None:
            print(text(row), flush=True)
            write(self, self.args)

    def compare(self, row: Row, out: torch.Tensor) -> None:
        if out.dtype == torch.uint8:
            out = out.float() / 127.5 - 1
        if self.reference is None:
            self.reference = out.cpu()
        worst, squares = 0.0, 0.0
        for t in range(out.shape[2]):
            delta = (out[:, :, t].float() - self.reference[:, :, t].to(out.device).float()).abs()
            worst, squares = max(worst, delta.max().item()), squares + delta.square().mean().item()
        mean = squares / out.shape[2]
        row.max_diff = worst
        row.psnr = None if mean == 0 else 10 * torch.log10(torch.tensor(4.0 / mean)).item()

    def make(self, layout: str) -> tuple[Any, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = SMALL[layout] if self.args.small else LAYOUTS[layout]["latent"]
        return self.make_vae(layout), torch.randn(shape, generator=generator).to(self.device, self.dtype)

    def make_vae(self, layout: str) -> Any:
        import diffusers

        cls = getattr(diffusers, LAYOUTS[layout].get("class", "AutoencoderKLWan"))
        torch.manual_seed(0)
        with torch.device(self.device):
            return cls(**LAYOUTS[layout]["config"]).eval().requires_grad_(False).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def reset_peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self, before: int) -> float:
        return (torch.cuda.max_memory_allocated() - before) / 2**30 if self.device.type == "cuda" else 0.0

    def selected(self, name: str) -> bool:
        if name == "diffusers untiled":  # the reference
            return True
        if self.args.skip and any(part in name for part in self.args.skip.split(",")):
            return False
        return not self.args.only or any(part in name for part in self.args.only.split(","))

    def out_of_time(self) -> bool:
        late = torch.tensor([float(time.monotonic() > self.end)], device=self.device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        return bool(late.item())


def text(row: Row) -> str:
    peak = " ".join(f"{each:.2f}" for each in row.peak)
    predicted = " ".join(f"{each:.2f}" for each in row.predicted)
    diff = "" if row.max_diff is None else f"diff {row.max_diff:.4f}"
    psnr = "" if row.psnr is None else f"{row.psnr:.1f} dB"
    took = f"{row.seconds:7.3f} s +-{row.spread:.3f} (first {row.first:.1f})"
    return f"{row.layout} P={row.ranks} {row.arm:34} {took} peak {peak} [{predicted}] {diff} {psnr} {row.note}"


def profile(bench: Bench, layout: str) -> None:
    """Where one GPU's time goes, fast operators: the kernels that take most."""
    vae, given = bench.make(layout)
    handle = bench.parallelize(vae, dist.new_group([0], use_local_synchronization=True), strict=False)
    handle.wait_for_kernels(given.shape)
    with torch.no_grad():
        bench.call(vae, given)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            bench.call(vae, given)
            torch.cuda.synchronize()
    handle.remove()
    print(f"kernels, {layout}, one GPU, fast:")
    events = sorted(prof.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:16]:
        print(f"  {event.self_device_time_total / 1e3:9.1f} ms {event.count:6d} x {event.key[:110]}")


def work(rank: int, size: int, args: argparse.Namespace, kind: type[Bench]) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=size)
    bench = kind(rank, size, args)
    for layout in args.layouts:
        bench.layout(layout)
        gc.collect()
    if rank == 0:
        for ratio in ratios(bench.rows):
            print(ratio)
        if args.profile and torch.cuda.is_available():
            for layout in args.layouts:
                profile(bench, layout)
        write(bench, args)
    dist.barrier()
    dist.destroy_process_group()


def write(bench: Bench, args: argparse.Namespace) -> None:
    import diffusers

    state = checkout.state()
    record = {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
        "gpus": bench.size,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        **state,
        "ratios": ratios(bench.rows),
        "rows": [asdict(row) | state for row in bench.rows],
    }
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n")


def ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """How many times faster each arm of ours is than diffusers on one GPU, and than its own operators on one."""
    alone = {(row.layout, row.arm): row.seconds for row in rows if row.ranks == 1 and row.seconds}
    found = []
    for row in rows:
        if not row.seconds or not row.arm.startswith("wanshim"):
            continue
        same = alone.get((row.layout, "wanshim strict" if "strict" in row.arm else "wanshim fast"))
        times = {
            "of diffusers": alone.get((row.layout, "diffusers untiled")),
            "of diffusers tiled": alone.get((row.layout, "diffusers tiled")),
            "of the same operators on one GPU": same,
        }
        found.append(
            {"layout": row.layout, "arm": row.arm, "ranks": row.ranks}
            | {name: round(seconds / row.seconds, 3) for name, seconds in times.items() if seconds}
        )
    return found


def main(kind: type[Bench] = Bench) -> None:
    parser = argparse.ArgumentParser(description=f"{kind.title} on 1 to N GPUs.")
    parser.add_argument("--ranks", type=lambda s: [int(n) for n in s.split(",")], default=[1, 2, 4])
    parser.add_argument("--layouts", type=lambda s: s.split(","), default=list(LAYOUTS))
    parser.add_argument("--chunks", type=lambda s: [int(n) for n in s.split(",") if n], default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip", default="", help="leave out arms whose name contains one of these words")
    parser.add_argument("--only", default="", help="run arms whose name contains one of these words")
    parser.add_argument("--seconds", type=float, default=480, help="start no arm after this long")
    parser.add_argument("--small", action="store_true", help="tiny latents, to try the script out")
    parser.add_argument("--peers", action="store_true", help="vLLM-Omni's decoders too")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--port", type=int, default=29611)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    available = torch.cuda.device_count() if torch.cuda.is_available() else max(args.ranks)
    args.ranks = [n for n in args.ranks if n <= available]
    mp.spawn(work, args=(max(args.ranks), args, kind), nprocs=max(args.ranks))


if __name__ == "__main__":
    main()
