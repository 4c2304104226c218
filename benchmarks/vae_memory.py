"""Decode and encode on a card with little memory left: seconds, peak and plan for 8, 12, 16 and 24 GiB.

    python benchmarks/vae_memory.py --json benchmarks/results/vae_memory_1xH200.json
    python benchmarks/vae_memory.py --layouts qwen-image --free 4,8,24

One GPU, random weights, the shapes of vae_decode.py: 704x1280 with 81 frames (2.1) and 121 (2.2), and one picture of
2048x2048. The allocator is held to what the VAE and its input take and so many GiB more, by
`torch.cuda.set_per_process_memory_fraction`. An arm that ends out of memory, or is refused, is a row with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import vae_decode
import vae_encode
from model_split import environment

from wanshim.core.decoding import parallelize_decode, parallelize_encode

GIB = 2**30
DECODES, ENCODES = ("auto", "tile"), ("auto",)  # on one GPU temporal and spatial are what auto is


def arms(verb: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    yield "diffusers", None
    for mode in DECODES if verb == "decode" else ENCODES:
        for strict in (True, False):
            yield f"{mode} {'strict' if strict else 'fast'}", {"mode": mode, "strict": strict}


def make(layout: str) -> Any:
    import diffusers

    known = vae_decode.LAYOUTS[layout]
    torch.manual_seed(0)
    with torch.device("cuda"):
        vae = getattr(diffusers, known.get("class", "AutoencoderKLWan"))(**known["config"])
    return vae.eval().requires_grad_(False).to(torch.bfloat16)


def measure(vae: Any, given: torch.Tensor, verb: str, options: dict[str, Any] | None, calls: int) -> dict[str, Any]:
    """Seconds of the first call and of the fastest later one, GiB added, and the plan or why there is none."""
    parallelize = parallelize_decode if verb == "decode" else parallelize_encode
    handle = None if options is None else parallelize(vae, **options)
    if handle is not None:
        handle.wait_for_kernels()
    seconds: list[float] = []
    failure = ""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(calls):
            begin = time.perf_counter()
            getattr(vae, verb)(given)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
    except Exception as error:  # out of memory or refused: a row
        failure = f"{type(error).__name__}: {str(error)[:300]}"
    found = {
        "first": seconds[0] if seconds else None,
        "seconds": min(seconds[1:], default=None),
        "peak_GiB": (torch.cuda.max_memory_allocated() - before) / GIB,
        "predicted_GiB": None,
        "plan": "" if handle is None or not seconds else str(handle.plan),
        "failure": failure,
    }
    if handle is not None:
        if seconds:
            found["predicted_GiB"] = max(handle.plan.peak) / GIB
        handle.remove()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="2.1,2.2,qwen-image")
    parser.add_argument("--free", default="8,12,16,24", help="GiB")
    parser.add_argument("--verbs", default="decode,encode")
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    total = torch.cuda.get_device_properties(0).total_memory
    rows: list[dict[str, Any]] = []
    for layout in args.layouts.split(","):
        vae = make(layout)
        for verb in args.verbs.split(","):
            shape = vae_decode.LAYOUTS[layout]["latent"] if verb == "decode" else vae_encode.VIDEOS[layout]
            given = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
            for free in map(float, args.free.split(",")):
                for arm, options in arms(verb):
                    torch.cuda.empty_cache()
                    fraction = (torch.cuda.memory_allocated() + free * GIB) / total
                    torch.cuda.set_per_process_memory_fraction(min(fraction, 1.0))
                    with torch.no_grad():
                        found = measure(vae, given, verb, options, args.calls)
                    rows.append({"layout": layout, "verb": verb, "free_GiB": free, "arm": arm, **found})
                    line = {name: value for name, value in rows[-1].items() if name != "plan"}
                    print(json.dumps(line), flush=True)
                    torch.cuda.set_per_process_memory_fraction(1.0)
                    if args.json:  # after each row: a time limit may end the run
                        args.json.write_text(json.dumps(environment(args) | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
