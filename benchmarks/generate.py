"""A whole call of Wan on several GPUs: alone, by wanshim, and by its peers, in one run.

    python benchmarks/generate.py --ranks 2 --json benchmarks/results/generate_480p_2xH200.json
    python benchmarks/generate.py --size 720x1280x81 --steps 2 --arms alone cfg:2 sequence:2 ulysses usp xdit
    python benchmarks/generate.py --arms alone cuda:0,cuda:0        two processes on one GPU: bits, cost of sharing
    python benchmarks/generate.py --ranks 1 --steps 2 --limit 120 --arms alone fast     what changes bits, on one GPU
    python benchmarks/generate.py --ranks 1 --steps 2 --arms alone fast compiled torchao_float8     and diffusers' own

An arm is `alone`, `strict_blocks` or `fast` of one GPU, diffusers' own `compiled` and `torchao_float8`, one of the
peers in generate_peers.py, or what wanshim takes for the GPUs: `cfg:2`, `sequence:2`.
Each arm runs in processes of its own, with the same random weights, prompt embeddings, noise and scheduler. It calls
its pipeline with few frames and one step, to warm up, and then once in full size. The next arm's processes import
meanwhile. An arm that fails is a row with the reason. Steps are guided: two forwards. What a row has:

    seconds_per_step    median of the steps after the first; of the only one where --steps is 1
    fifty_steps_s       50 x seconds_per_step
    whole_call_s        that, and what follows the last step: decode. Of a peer with the seconds of `alone`'s decode
    gain, whole_gain    of seconds_per_step and whole_call_s over `alone`
    share_cost          guidance over 2: the step beside half of a step alone, as a share of that half, a forward
    next_decode_s       of wanshim: the decode of a second call of the same size
    max_diff, off, latents_equal, frames_equal    beside `alone`, after --steps steps; off: by the norm of the latents
    peak_GiB            max_memory_allocated of each GPU at the end of the last step; predicted_GiB: of wanshim's plan
    start_s, weights_s, weights_GB_per_s, recheck_s    wanshim's workers: waiting for them, until they have the weights,
                        and in a later call to see that the weights are the same
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import checkout
import generate_arm
import torch

from wanshim.launch.ranks import free_port

STEPS = 50
GIB = 2**30


class Group:
    """The processes of one arm. They import, and begin when told to."""

    def __init__(self, arm: str, args: argparse.Namespace, parent: str) -> None:
        from generate_peers import PEERS

        self.arm, self.folder = arm, Path(tempfile.mkdtemp(dir=parent))
        height, width, frames = map(int, args.size.split("x"))
        count = args.ranks if arm in PEERS else 1
        job = {"arm": arm, "model": args.model, "height": height, "width": width, "frames": frames}
        job |= {"steps": args.steps, "ranks": args.ranks, "folder": str(self.folder)}
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
        self.processes = []
        for rank in range(count):
            environment = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
            command = [sys.executable, __file__, "--job", json.dumps(job | {"rank": rank})]
            with (self.folder / f"{rank}.log").open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        env=os.environ | environment,
                        start_new_session=True,
                    )
                )

    def run(self, end: float) -> list[dict[str, Any]]:
        """What each process measured until then; `failed` has the reason where one did not."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it failed at an import
                os.write(process.stdin.fileno(), b"begin\n")
        begun = time.monotonic()
        while time.monotonic() < end and any(process.poll() is None for process in self.processes):
            if any(process.poll() for process in self.processes):
                end = min(end, time.monotonic() + 5.0)  # the others wait for it in vain
            time.sleep(0.05)
        self.end()
        late = f"no result after {time.monotonic() - begun:.0f} s"
        return [self._read(rank) or {"failed": late} for rank in range(len(self.processes))]

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def latents(self) -> torch.Tensor:
        return torch.load(self.folder / "0.pt", weights_only=True)

    def log(self, rank: int) -> str:
        """The end of what a process printed."""
        return (self.folder / f"{rank}.log").read_text(errors="replace")[-2000:]

    def _read(self, rank: int) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return json.loads((self.folder / f"{rank}.json").read_text())
        status = self.processes[rank].returncode
        return {} if status in (-signal.SIGKILL, 0) else {"failed": f"ended with status {status}"}


class Record:
    """Rows, and the file that they go to after each arm."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[dict[str, Any]] = []
        self.alone: dict[str, Any] = {}
        self.latents: torch.Tensor | None = None
        self.about = {"size": args.size, "model": args.model, "ranks": args.ranks, "steps": args.steps}
        self.about |= checkout.state()

    def add(self, group: Group, found: list[dict[str, Any]]) -> None:
        row = self._measured(group, found)
        self.rows.append(row)
        print(text(row), flush=True)
        if self.args.json:
            Path(self.args.json).write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n")

    def _measured(self, group: Group, found: list[dict[str, Any]]) -> dict[str, Any]:
        failures = [(rank, each["failed"]) for rank, each in enumerate(found) if "failed" in each]
        if failures:
            rank, reason = min(failures, key=lambda failure: "no result" in failure[1])  # the others waited for it
            return {"arm": group.arm, "failed": f"GPU {rank}: {reason}", "log": group.log(rank)}
        row = {"arm": group.arm, **found[0]}
        self.about |= {name: row.pop(name) for name in ("gpu", "torch", "diffusers")}
        peaks = [peak for each in found for peak in each.pop("peak_bytes")]
        row["peak_GiB"] = [peak / GIB for peak in peaks]
        row["predicted_GiB"] = [peak / GIB for peak in row.pop("predicted_bytes", [])]
        steps = row["step_seconds"]
        row["seconds_per_step"] = statistics.median(steps[1:] or steps)
        row["fifty_steps_s"] = STEPS * row["seconds_per_step"]
        decodes = row if "frames_sha256" in row else self.alone
        if "after_s" in decodes:
            row["whole_call_s"] = row["fifty_steps_s"] + decodes["after_s"]
        latents = group.latents()
        if group.arm == "alone":
            self.alone, self.latents = row, latents
        if self.latents is not None:
            row |= beside(row, self.alone)
            row |= {"max_diff": (latents - self.latents).abs().max().item()}
            row |= {"off": ((latents - self.latents).norm() / self.latents.norm()).item()}
            row |= {"latents_equal": torch.equal(latents, self.latents)}
        return row


def beside(row: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    found = {"gain": alone["seconds_per_step"] / row["seconds_per_step"]}
    found["whole_gain"] = alone["whole_call_s"] / row["whole_call_s"]
    if "frames_sha256" in row:
        found["frames_equal"] = row["frames_sha256"] == alone["frames_sha256"]
    if row["arm"] == "cfg:2":
        found["share_cost"] = 2 * row["seconds_per_step"] / alone["seconds_per_step"] - 1
    return found


def text(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['arm']:18} {row['failed']}"
    peak = " ".join(f"{each:.1f}" for each in row["peak_GiB"])
    predicted = " ".join(f"{each:.1f}" for each in row["predicted_GiB"])
    whole = f"whole {row.get('whole_call_s', float('nan')):7.1f} s ({row.get('whole_gain', float('nan')):.3f}x)"
    equal = (
        "equal"
        if row.get("frames_equal", row.get("latents_equal"))
        else f"diff {row.get('max_diff', float('nan')):.2e}"
    )
    start = f"start {row['start_s']:.1f} s, {row['weights_GB_per_s']:.1f} GB/s" if "start_s" in row else ""
    step = f"{row['seconds_per_step']:8.3f} s/step {row.get('gain', float('nan')):.3f}x"
    return f"{row['arm']:18} {step} {whole} {equal} peak {peak} [{predicted}] {start}"


def measure(job: generate_arm.Job) -> None:
    """A process of an arm: imports, waits for its turn, writes what it measured, and ends."""
    from generate_peers import PEERS

    result: dict[str, Any] = {}
    try:
        peer = PEERS.get(job.arm)
        for name in ("diffusers.pipelines.wan.pipeline_wan", *(peer.modules if peer else ("wanshim",))):
            importlib.import_module(name)
        if sys.stdin.readline():  # else the benchmark is gone
            make = peer.make if peer else generate_arm.ON_ONE_GPU.get(job.arm, generate_arm.shared)
            with torch.no_grad():
                result = generate_arm.measure(job, make(job))
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}"[:600]}
    Path(job.folder, f"{job.rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit("failed" in result)  # a process group that waits for its end would hold the next arm up


def default_arms(ranks: int) -> list[str]:
    from generate_peers import PEERS

    together = [f"cfg:2,sequence:{ranks // 2}"] if ranks > 2 else []
    return ["alone", "cfg:2", *together, f"sequence:{ranks}", *PEERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=generate_arm.MODELS, default="14B")
    parser.add_argument("--size", default="480x832x81", help="height x width x frames")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of each peer")
    parser.add_argument("--arms", nargs="+", help="default: alone, wanshim's for --ranks GPUs, all peers")
    parser.add_argument("--steps", type=int, default=3, help="of the call that is timed")
    parser.add_argument("--limit", type=float, default=500, help="seconds of the whole run")
    parser.add_argument("--arm-limit", type=float, default=150, help="seconds of an arm, from its turn on")
    parser.add_argument("--json", default="")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        measure(generate_arm.Job(**json.loads(args.job)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    end = time.monotonic() + args.limit
    arms, record, groups = args.arms or default_arms(args.ranks), Record(args), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            groups.append(Group(arms[0], args, folder))
            for number, following in enumerate([*arms[1:], None]):
                if following:
                    groups.append(Group(following, args, folder))
                record.add(groups[number], groups[number].run(min(end, time.monotonic() + args.arm_limit)))
        finally:
            for group in groups:
                group.end()
    print(f"\n{args.model} {args.size}, {args.ranks} GPUs, {args.limit - end + time.monotonic():.0f} s in all")
    print("\n".join(map(text, record.rows)))


if __name__ == "__main__":
    main()
