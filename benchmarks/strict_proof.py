"""What it costs that strict compares its result with the framework's own: in the first call of a size, and after it.

    python benchmarks/strict_proof.py --json benchmarks/results/strict_proof_1xH200.json
    torchrun --nproc-per-node 2 benchmarks/strict_proof.py --json benchmarks/results/strict_proof_2xH200.json
    python benchmarks/strict_proof.py --small                       on a CPU

Kernels and engines are learned at another handle first, so that a call is a decode or an encode and its comparison. The
first call is one of a size that this handle has not seen; the share after it is that of `--calls` calls, beside the one
that calls at the intervals in which comparisons come would have in the long run. What is counted as comparing is the
time in `Comparison.most_frames` and in short calls made for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import checkout
import first_call
import torch
import torch.distributed as dist
import vae_decode
from generate_arm import synchronize

from wanshim.core.decoding import ParallelVae, VaeOptions, find_binding
from wanshim.core.decoding.proof import Comparison
from wanshim.core.decoding.run import CallRun


class Spent:
    """Seconds in what is made for comparing."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for cls, name in ((Comparison, "most_frames"), (CallRun, "_rehearse")):
            setattr(cls, name, self._timed(getattr(cls, name)))
        self._inside = False

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if self._inside:  # a short call is compared within itself
                return original(*args)
            self._inside = True
            synchronize()
            begun = time.perf_counter()
            try:
                return original(*args)
            finally:
                synchronize()
                self.seconds += time.perf_counter() - begun
                self._inside = False

        return timed


@torch.no_grad()
def measure(layout: str, verb: str, args: argparse.Namespace, device: torch.device, spent: Spent) -> dict[str, Any]:
    import diffusers

    torch.manual_seed(0)
    with torch.device(device):
        config = vae_decode.LAYOUTS[layout]["config"] | ({"base_dim": 8} if args.small else {})
        vae = diffusers.AutoencoderKLWan(**config).eval().requires_grad_(False)
    vae = vae.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    shape = first_call.shapes(layout, verb, args.small)[0]
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1)).clamp(-1, 1).to(device, vae.dtype)
    graph = find_binding(vae, verb).graph
    seconds: list[float] = []
    comparing: list[float] = []
    for calls in (2, 1 + args.calls):  # the first handle learns
        parallel = ParallelVae(graph, None, VaeOptions(), learning=None)
        seconds, comparing = [], []
        for _ in range(calls):
            spent.seconds = 0.0
            if dist.is_initialized():
                dist.barrier()
            synchronize()
            begun = time.perf_counter()
            parallel(given)
            synchronize()
            seconds.append(time.perf_counter() - begun)
            comparing.append(spent.seconds)
        assert parallel.plan is not None
        claim, compared = parallel.plan.claim, parallel.plan.compared
        interval = max(state.calls_left for state in parallel._states.values())
        parallel.release()
    usual = statistics.median(seconds[1:])
    return {
        "layout": layout,
        "verb": verb,
        "first_s": seconds[0],
        "first_comparing_s": comparing[0],
        "first_share": comparing[0] / seconds[0],
        "later_s": usual,
        "calls": args.calls,
        "later_comparing_s": sum(comparing[1:]),
        "later_share": sum(comparing[1:]) / sum(seconds[1:]),
        "calls_until_the_next": interval,
        "claim": claim,
        "compared": compared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="2.1,2.2")
    parser.add_argument("--verbs", default="decode,encode")
    parser.add_argument("--calls", type=int, default=6, help="after the first")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if on_cuda else "gloo")
    spent = Spent()
    pairs = product(args.layouts.split(","), args.verbs.split(","))
    rows = [measure(layout, verb, args, device, spent) for layout, verb in pairs]
    if rank == 0:
        for row in rows:
            print(
                f"{row['layout']} {row['verb']} on {ranks}: first {row['first_s']:.3f} s, of which comparing "
                f"{row['first_share']:.1%}; later {row['later_s']:.3f} s, comparing {row['later_share']:.2%}; "
                f"again in {row['calls_until_the_next']} calls; {row['claim']}: {row['compared']}",
                flush=True,
            )
        if args.json:
            gpu = torch.cuda.get_device_name(0) if on_cuda else "CPU"
            record = {"gpu": gpu, "gpus": ranks, "torch": torch.__version__, **checkout.state(), "rows": rows}
            args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
