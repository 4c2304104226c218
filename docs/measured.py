"""The tables of numbers in README.md: every one read from a raw result under benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def training_table() -> str:
    """A training step of the 14B DiT by number of GPUs and micro-batches."""
    lines = [
        "| 14B DiT, LoRA r=32, 480x832x49 | GPUs | seconds a micro-batch | against one GPU | peak GiB a GPU |",
        "|---|---|---|---|---|",
    ]
    split = result("model_split_2xh200")
    for title, arm in split["arms"].items():
        ratio = split["arms"]["one GPU"]["median"] / arm["median"]
        lines.append(_training_line(f"1 micro-batch, {title}", arm["median"], ratio, arm["peak_GiB"]))
    for name in ("model_split_lanes_2xH200", "model_split_lanes_4xH200"):
        for count, arm in result(name)["lanes"].items():
            seconds = arm["median"] / int(count)
            title = f"{count} micro-batches of one optimizer step"
            lines.append(_training_line(title, seconds, arm["speed_up"], arm["peak_GiB"]))
    return "\n".join([*lines, "", f"{_where(split)}; {_where(result('model_split_lanes_4xH200'))}."])


def _training_line(title: str, seconds: float, ratio: float, peaks: dict[str, float]) -> str:
    peak = " / ".join(f"{value:.1f}" for value in peaks.values())
    return f"| {title} | {len(peaks)} | {seconds:.2f} | {ratio:.2f}x | {peak} |"


def _where(found: dict[str, Any]) -> str:
    devices = found["arguments"]["devices"]
    command = f"python benchmarks/{found['benchmark']}.py --devices {devices}"
    return f"{found['gpu']}, torch {found['torch']}, commit {found['commit'][:7]}: `{command}`"


ARMS = (
    "diffusers untiled",
    "diffusers tiled",
    "vLLM-Omni 0.30 tile executor",
    "vLLM-Omni 0.30 spatial shard, height",
    "wanshim strict",
    "wanshim temporal strict",
    "wanshim fast",
    "wanshim temporal",
    "wanshim spatial",
)


def decode_table() -> str:
    """Seconds of one decode by arm and number of GPUs."""
    found = result("vae_decode_2.1")
    ranks = sorted({row["ranks"] for row in found["rows"]})
    seconds = {(row["arm"], row["ranks"]): row for row in found["rows"]}
    heads = " | ".join(f"{n} GPU" + "s" * (n > 1) for n in ranks)
    lines = [
        f"| Wan 2.1 VAE, 704x1280, 81 frames | {heads} | equal to diffusers untiled (-1 to 1) |",
        "|---" * (len(ranks) + 2) + "|",
    ]
    for arm in ARMS:
        rows = [seconds.get((arm, n)) for n in ranks]
        worst = max(row["max_diff"] for row in rows if row)
        times = " | ".join(f"{row['seconds']:.2f} s" if row else "" for row in rows)
        lines.append(f"| {arm} | {times} | {_exactness(worst)} |")
    return "\n".join(
        [*lines, "", f"bf16, {found['gpu']}, commit {found['commit'][:7]}: `python benchmarks/vae_decode.py --peers`."]
    )


def _exactness(worst: float) -> str:
    return "bit for bit" if worst == 0 else f"within {worst:.2f}"
