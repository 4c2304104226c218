"""What the first calls of a process cost, on a machine that knows nothing and on one that does, beside diffusers.

    python benchmarks/first_call.py --layouts 2.1,2.2 --json benchmarks/results/first_call_1xH200.json
    python benchmarks/first_call.py --service --layouts 2.1 --json benchmarks/results/first_call_service_1xH200.json

Each arm is a process of its own. The first of an arm finds an empty home, and so no engine and no compiled kernel that
an earlier run left; the second finds what the first one kept. Each calls one size three times, then another size twice.
The ratio of a call is its time over that of diffusers' same call in its one process, which keeps nothing. A call that
was left to the framework has a star.

`--service` calls twenty sizes of nine latent frames in turn, three rounds of them, in one process that finds an empty
home; its columns are rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkout
import torch
import vae_decode

from wanshim.core.decoding import parallelize_decode, parallelize_encode

ARMS = ("diffusers", "strict", "fast")
CALLS = (0, 0, 0, 1, 1)  # which of the two sizes each call has
OTHER = 0.75  # the second size, of the first's height and width
SIZES, ROUNDS = 20, 3  # of a service


def shapes(layout: str, verb: str, small: bool, service: bool = False) -> list[list[int]]:
    """Of the latents, or of the videos they come from."""
    latent = vae_decode.SMALL[layout] if small else vae_decode.LAYOUTS[layout]["latent"]
    batch, channels, frames, height, width = latent
    sizes = [(height, width), (int(OTHER * height) // 2 * 2, int(OTHER * width) // 2 * 2)]
    if service:  # no two alike, and no order by size
        frames = min(frames, 9)
        sizes = [(sizes[1][0] + 4 * (7 * n % SIZES // 4), sizes[1][1] + 2 * (3 * n % SIZES)) for n in range(SIZES)]
    if verb == "decode":
        return [[batch, channels, frames, *size] for size in sizes]
    factor = vae_decode.LAYOUTS[layout]["config"].get("scale_factor_spatial", 8)
    return [[batch, 3, 4 * frames - 3, factor * h, factor * w] for h, w in sizes]


@torch.no_grad()
def child(layout: str, verb: str, arm: str, small: bool, service: bool) -> dict[str, Any]:
    """Seconds of each call in this process and, of strict, whether the last result is diffusers'."""
    import diffusers

    on_cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_cuda else ("cpu", torch.float32)
    torch.manual_seed(0)
    with torch.device(device):
        vae = diffusers.AutoencoderKLWan(**vae_decode.LAYOUTS[layout]["config"]).eval().requires_grad_(False).to(dtype)
    given = [
        torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes(layout, verb, small, service)
    ]
    values = [each.clamp(-1, 1).to(device, dtype) for each in given]

    def call(index: int) -> torch.Tensor:
        made = (
            vae.decode(values[index]).sample if verb == "decode" else vae.encode(values[index]).latent_dist.parameters
        )
        if on_cuda:
            torch.cuda.synchronize()
        assert isinstance(made, torch.Tensor)
        return made

    parallelize = parallelize_decode if verb == "decode" else parallelize_encode
    handle = None if arm == "diffusers" else parallelize(vae, strict=arm == "strict")
    seconds, left = [], []
    calls = [*range(SIZES)] * ROUNDS if service else CALLS
    for index in calls:
        if handle is not None:
            handle.parallel.plan = None  # a call that is left makes none
        start = time.perf_counter()
        made = call(index)
        seconds.append(time.perf_counter() - start)
        left.append(handle is not None and handle.parallel.plan is None)
    equal, reasons = None, [] if handle is None else list(handle._reasons)
    if handle is not None and arm == "strict":
        handle.remove()
        equal = torch.equal(made, call(calls[-1]))
    return {"seconds": seconds, "left": left, "reasons": reasons, "equal": equal}


def run(layout: str, verb: str, arm: str, home: str, small: bool, service: bool) -> dict[str, Any]:
    own = [sys.executable, __file__, "--child", arm, "--layouts", layout, "--verbs", verb]
    own += ["--small"] * small + ["--service"] * service
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"HOME": home, "TRITON_CACHE_DIR": f"{home}/triton", "PYTHONPATH": paths}
    variables.pop("XDG_CACHE_HOME", None)
    done = subprocess.run(own, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="2.1,2.2")
    parser.add_argument("--verbs", default="decode,encode")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--service", action="store_true", help="twenty sizes in turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.layouts, args.verbs, args.child, args.small, args.service)))
        return
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    about = {"gpu": gpu, "torch": torch.__version__, **checkout.state(), "calls": CALLS}
    if args.service:
        about["calls"] = [*range(SIZES)] * ROUNDS
    rows: list[dict[str, Any]] = []
    for layout in args.layouts.split(","):
        for verb in args.verbs.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for arm in args.arms.split(","):
                    home = Path(folder, arm)
                    home.mkdir()
                    for process in ("first",) if arm == "diffusers" or args.service else ("first", "second"):
                        found = run(layout, verb, arm, str(home), args.small, args.service)
                        rows.append({"layout": layout, "verb": verb, "arm": arm, "process": process, **found})
                        print(text(rows[-1], rows), flush=True)
                        if args.json:  # after each row: a time limit may end the run
                            record = json.dumps({**about, "rows": rows}, indent=1)
                            args.json.write_text(record + "\n", encoding="utf-8")


def rounds(row: dict[str, Any]) -> dict[str, Any]:
    """Of a service, a round in place of its calls."""
    parts = [slice(start, start + SIZES) for start in range(0, SIZES * ROUNDS, SIZES)]
    seconds = [sum(row["seconds"][part]) for part in parts]
    return row | {"seconds": seconds, "left": [any(row["left"][part]) for part in parts]}


def text(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    same = ("layout", "verb")
    plain = next((r for r in rows if r["arm"] == "diffusers" and all(r[name] == row[name] for name in same)), row)
    if len(row["seconds"]) == SIZES * ROUNDS:
        row, plain = rounds(row), rounds(plain)
    cells = (
        f"{took:7.2f} s {took / of:5.2f}x{'*' if left else ' '}"
        for took, of, left in zip(row["seconds"], plain["seconds"], row["left"])
    )
    equal = "" if row["equal"] is None else f"  equal: {row['equal']}"
    return f"{row['layout']} {row['verb']} {row['arm']:9} {row['process']:6} process {'  '.join(cells)}{equal}"


if __name__ == "__main__":
    main()
