"""Decode and encode on a card with little memory left: seconds, peak and plan for 8, 12, 16 and 24 GiB.

    python benchmarks/vae_memory.py --json benchmarks/results/vae_memory_1xH200.json
    python benchmarks/vae_memory.py --layouts qwen-image --verbs decode --free 24 --calls 8 --largest 6

One GPU, random weights, the shapes of vae_decode.py: 704x1280 with 81 frames (2.1) and 121 (2.2), and one picture of
2048x2048. The allocator is held to what the VAE and its input take and so many GiB more, by
`torch.cuda.set_per_process_memory_fraction`. An arm that ends out of memory, or is refused, is a row with the reason.
Each arm has a process of its own: torch keeps the engine of cuDNN that a call took when its memory ran out, and later
calls of that process take it, too. A record that exists is completed: its rows of other arms stay. `--largest` names
what is held at each call's peak, workspaces of cuDNN included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import vae_decode
import vae_encode
from model_split import environment

from wanshim.core.decoding import parallelize_decode, parallelize_encode

GIB = 2**30
EVENTS, DEEP = 200_000, 4  # of the history; frames of a place
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


def largest_at_peak(events: list[dict[str, Any]], count: int) -> list[str]:
    """GiB and place of the largest allocations alive when they are the most together, of torch's memory history."""
    held: dict[int, dict[str, Any]] = {}
    total, most, at = 0, 0, 0
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            held[event["addr"]] = event
            total += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in held:
            total -= held.pop(event["addr"])["size"]
        if total > most:
            most, at = total, index
    held = {}
    for event in events[: at + 1]:
        if event["action"] == "alloc":
            held[event["addr"]] = event
        elif event["action"] == "free_completed":
            held.pop(event["addr"], None)
    kept = sorted(held.values(), key=lambda event: -event["size"])[:count]
    return [f"{event['size'] / GIB:.2f} GiB by {place(event.get('frames', []))}" for event in kept]


def place(frames: list[dict[str, Any]]) -> str:
    named = [frame for frame in frames if frame["filename"].endswith(".py")][:DEEP]
    return " < ".join(f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in named)


@torch.no_grad()
def measure(
    layout: str, verb: str, free: float, options: dict[str, Any] | None, calls: int, largest: int
) -> dict[str, Any]:
    """Seconds of the first call and of the fastest later one, GiB that each adds, and the plan or why there is none.

    A call that compares its result holds what the framework computes for that, too, if there is room.
    """
    vae = make(layout)
    shape = vae_decode.LAYOUTS[layout]["latent"] if verb == "decode" else vae_encode.VIDEOS[layout]
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    parallelize = parallelize_decode if verb == "decode" else parallelize_encode
    handle = None if options is None else parallelize(vae, **options)
    if handle is not None:
        handle.wait_for_kernels(given.shape)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min((before + free * GIB) / total, 1.0))
    seconds: list[float] = []
    peaks: list[float] = []
    held: list[list[str]] = []
    failure = ""
    try:
        for _ in range(calls):
            torch.cuda.reset_peak_memory_stats()
            if largest:
                torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python")
            begin = time.perf_counter()
            getattr(vae, verb)(given)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            peaks.append((torch.cuda.max_memory_allocated() - before) / GIB)
            if largest:
                events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
                torch.cuda.memory._record_memory_history(enabled=None)
                held.append(largest_at_peak(events, largest))
    except Exception as error:  # out of memory or refused: a row
        failure = f"{type(error).__name__}: {str(error)[:300]}"
    ran = handle is not None and bool(seconds)
    return {
        "first": seconds[0] if seconds else None,
        "seconds": min(seconds[1:], default=None),
        "peak_GiB": max(peaks, default=(torch.cuda.max_memory_allocated() - before) / GIB),
        "peaks_GiB": peaks,
        "largest": held,
        "predicted_GiB": max(handle.plan.peak) / GIB if ran else None,
        "plan": str(handle.plan) if ran else "",
        "failure": failure,
    }


def rows_of(path: Path | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record of the same GPU and torch."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    if any(found[name] != about[name] for name in ("gpu", "torch")):
        raise SystemExit(f"{path} is of {found['gpu']} and torch {found['torch']}: give another name")
    return [{name: found[name] for name in ("commit", "clean")} | row for row in found["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="2.1,2.2,qwen-image")
    parser.add_argument("--free", default="8,12,16,24", help="GiB")
    parser.add_argument("--verbs", default="decode,encode")
    known = [arm for arm, _ in arms("decode")]
    parser.add_argument("--arms", default=",".join(known))
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--largest", type=int, default=0, help="how many allocations are named; slows the calls")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = args.arms.split(",")
    if unknown := set(wanted) - set(known):
        parser.error(f"no arm {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    about = environment(args)
    rows = rows_of(args.json, about)
    measured_at = {name: about[name] for name in ("commit", "clean")}
    for layout, verb, free in product(*(each.split(",") for each in (args.layouts, args.verbs, args.free))):
        for arm, options in arms(verb):
            if arm not in wanted:
                continue
            key = {"layout": layout, "verb": verb, "free_GiB": float(free), "arm": arm}
            rows = [row for row in rows if any(row[name] != value for name, value in key.items())]
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                asked = (layout, verb, float(free), options, args.calls, args.largest)
                rows.append(key | process.submit(measure, *asked).result() | measured_at)
            shown = {name: value for name, value in rows[-1].items() if name not in ("plan", "largest")}
            print(json.dumps(shown), *map("; ".join, rows[-1]["largest"]), sep="\n  ", flush=True)
            if args.json:  # after each row: a time limit may end the run
                args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
