"""The tables of numbers in README.md: every one read from a raw result under benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from writers.markdown import table

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def commit_of(found: dict[str, Any]) -> str:
    """The short hash, and that files differed from it where they did."""
    return found["commit"][:7] + (" (with changes)" if found.get("clean") is False else "")


def gpu_tests_table() -> str:
    """What `make gpu-tests` wrote: one line a machine."""
    rows = []
    for path in sorted(RESULTS.glob("gpu_tests_*.json")):
        found = result(path.stem)
        counts = found["outcomes"]
        failed = sum(number for outcome, number in counts.items() if outcome not in ("passed", "skipped"))
        gpus = f"{found['gpus']} x {found['gpu']}"
        outcomes = [str(counts.get("passed", 0)), str(counts.get("skipped", 0)), str(failed)]
        where = [found["torch"], found["driver"], found["date"][:10], commit_of(found)]
        link = f"`benchmarks/results/{path.name}`"
        rows.append((gpus, *outcomes, *where, link))
    heads = "GPUs | passed | skipped | failed | torch | driver | date | commit | record"
    return table(heads, rows) if rows else "No record of this release yet."


def _sequence_lines() -> list[tuple[object, ...]]:
    """One sample over all GPUs, in DiffSynth's own loop: of its one GPU in the same loop."""
    alone = result("sequence_training_480p_1xH200")["median"]
    lines = []
    for gpus in (2, 4):
        found = result(f"sequence_training_480p_{gpus}xH200")
        peaks = [found["peak_GiB"]] * gpus
        title = "1 micro-batch, sequence parallel and kept attention, whole steps of DiffSynth's loop"
        lines.append(_line(title, found["median"], alone / found["median"], peaks))
    return lines


STEP = "step | seconds | against DiffSynth's own | peak GiB | predicted"


def _step(name: str, arm: dict[str, Any], eager: float) -> tuple[object, ...]:
    seconds = min(arm["seconds"])
    return name, f"{seconds:.2f}", f"{eager / seconds:.2f}x", arm["allocated_GiB"], arm["predicted_GiB"]


def where(found: dict[str, Any]) -> str:
    return f"{found['gpu']}, torch {found['torch']}, commit {commit_of(found)}."


def step_table() -> str:
    """One GPU's step by what is changed in a block."""
    found = result("training_step_1xH200")
    rows = []
    eager = min(found["arms"]["eager"]["seconds"])
    for name, arm in found["arms"].items():
        exact = (arm["gradients_equal"], f"{arm['distance']['farthest']:.2g}") if "distance" in arm else ("", "")
        rows.append((*_step(name, arm, eager), *exact))
    return table(f"{STEP} | equal gradients | largest distance", rows, where(found))


def distance_table(record: str) -> str:
    """One GPU's step by what is changed in it, with the distance of its gradients."""
    found = result(record)
    rows = []
    eager = min(found["arms"]["eager"]["seconds"])
    for name, arm in found["arms"].items():
        close = ("", "", "")
        if "distance" in arm:
            cosines = (f"{arm[key]:.4f}" for key in ("smallest_cosine", "smallest_cosine_that_counts"))
            close = (f"{arm['distance']['middle']:.1%}", *cosines)
        rows.append((*_step(name, arm, eager), *close))
    return table(f"{STEP} | middle distance | smallest cosine | where the norm counts", rows, where(found))


def held_table() -> str:
    """One GPU's step where the allocator was held to a size, beside steps that were not."""
    found = result("training_step_16GiB_1xH200")
    rows = []
    eager = min(found["arms"]["eager"]["seconds"])
    for name, arm in found["arms"].items():
        title, *cells = _step(name, arm, eager)
        rows.append((title, arm["gib"], *cells, arm.get("gradients_equal")))
    heads = STEP.replace("step", "step | held to, GiB")
    return table(f"{heads} | equal gradients", rows, where(found))


def loss_table() -> str:
    """What a LoRA learns on a small model with the switches that change bits, beside other seeds."""
    found = result("loss_overlay")
    rows = []
    for name, losses in found["losses"].items():
        apart = sum(abs(a - b) for a, b in zip(losses, found["losses"]["eager"], strict=True)) / len(losses)
        rows.append((name, f"{sum(losses[-100:]) / 100:.4f}", f"{apart:.4f}"))
    return table("run | mean loss of the last 100 steps | mean distance to eager's, step by step", rows, where(found))


LOOPS = (
    "480p_1xH200",
    "480p_gpus1_1xH200",
    "480p_gpus1_fast_1xH200",
    "480p_48GiB_gpus1_1xH200",
    "480p_24GiB_gpus1_1xH200",
    "480p_16GiB_gpus1_1xH200",
    "720p_gpus1_1xH200",
    "480p_48GiB_gpus1_1xH100",
    "480p_48GiB_gpus1_fast_1xH100",
    "480p_24GiB_gpus1_fast_1xH100",
    "480p_16GiB_gpus1_fast_1xH100",
    "720p_gpus1_1xH100",
    "720p_gpus1_fast_1xH100",
    "720p_48GiB_gpus1_1xH100",
    "720p_48GiB_gpus1_fast_1xH100",
    "720p_24GiB_gpus1_1xH100",
    "720p_24GiB_gpus1_fast_1xH100",
    "480p_2xH200",
    "480p_compiled_2xH200",
    "480p_compiled_float8_2xH200",
    "480p_blocks_2xH200",
    "480p_blocks_compiled_2xH200",
    "480p_blocks_compiled_float8_2xH200",
    "480p_60_90GiB_2xH200",
    "480p_16GiB_2xH200",
    "480p_16GiB_compiled_float8_2xH200",
    "480p_4xH200",
    "480p_gpus4_4xH200",
    "480p_gpus4_fast_4xH200",
    "480p_60_40GiB_gpus4_4xH200",
    "480p_without_kept_attention_4xH200",
    "720p_4xH200",
    "720p_gpus4_4xH200",
    "720p_gpus4_fast_4xH200",
    "720p_22GiB_4xH200",
)


def sequence_table(only: str = "") -> str:
    """DiffSynth's loop with each sample over all GPUs; one H200 of the same length, where there is one, to compare.

    Args:
        only: the videos whose records begin like this.
    """
    return loop_table([f"sequence_training_{name}" for name in LOOPS if name.startswith(only)])


def loop_table(names: Iterable[str]) -> str:
    """One line for each record of a loop by benchmarks/sequence_training.py."""
    rows = []
    alone: dict[str, float] = {}
    for name in names:
        found = result(name)
        size = "{height}x{width}x{frames}".format(**found["arguments"])
        if not found["plan"]:
            alone[size] = found["median"]
        on_h200 = found["gpu"] == "NVIDIA H200"
        ratio = f"{alone[size] / found['median']:.2f}x" if size in alone and on_h200 else ""
        notes = [note for note in found["plan"] if note.startswith("predicted peak")]
        predicted = (re.findall(r"([\d.]+) GiB", "".join(notes)) or [None])[0]
        held = found["gib"] if isinstance(found["gib"], list) else [found["gib"]] * bool(found["gib"])
        video = size + (f", {' and '.join(f'{gib:g}' for gib in held)} GiB a GPU" if held else "")
        video += (
            ", attention computed again" if found["gpus"] > 1 and not any("kept" in n for n in found["plan"]) else ""
        )
        video += ", blocks kept" * any("kept blocks" in note for note in found["plan"])
        video += ", `--gpus 1`" * ("gpus1" in name) + ", `--fast`" * ("fast" in name) + ", H100" * (not on_h200)
        video += ", compiled" * any("blocks are compiled" in note for note in found["plan"])
        video += ", float8" * any("multiply in float8" in note for note in found["plan"])
        cells = (video, found["gpus"], f"{found['median']:.2f}", ratio, f"{found['peak_GiB']:.1f}", predicted)
        rows.append((*cells, commit_of(found)))
    return table("video | GPUs | seconds a step | against one GPU | peak GiB a GPU | predicted | commit", rows)


MINIMAX_H3 = (
    "minimax_h3_training_1xH200",
    "minimax_h3_training_24GiB_gpus1_1xH200",
    "minimax_h3_training_gpus2_2xH200",
    "minimax_h3_training_gpus4_4xH200",
)


def end_to_end_table() -> str:
    """The loop with text encoder and VAE: seconds a sample of each epoch, and of all with what is encoded."""
    records = [result(f"training_end_to_end_{count}xH200") for count in (2, 4)]
    rows = []
    for found in records:
        for row in found["rows"]:
            of_these = (each for each in found["rows"] if each["videos"] == row["videos"])
            base = next(each for each in of_these if each["way"] == "DiffSynth")
            samples, own = ([epoch["seconds_a_sample"] for epoch in each["epochs"]] for each in (row, base))
            whole = f"{row['seconds_with_all_encoding']:.0f}"
            if len(samples) == len(own):
                whole += f" ({base['seconds_with_all_encoding'] / row['seconds_with_all_encoding']:.2f}x)"
            steps = " / ".join(f"{seconds:.2f}" for seconds in samples)
            ratio = f"{own[1] / samples[1]:.2f}x of its {base['gpus']}"
            cells = (row["videos"], row["way"], row["gpus"], steps, ratio, whole)
            rows.append((*cells, f"{max(row['peaks_GiB']):.1f}", row["commit"][:7]))
    heads = (
        "videos | loop | GPUs | seconds a sample by epoch | against DiffSynth, second epoch | "
        "seconds of all epochs and what is encoded | peak GiB | commit"
    )
    return table(heads, rows, f"{records[0]['gpu']}, torch {records[0]['torch']}.")


def training_table() -> str:
    """A training step of the 14B DiT by number of GPUs, micro-batches and room."""
    rows = []
    split = result("model_split_2xh200")
    alone = split["arms"]["one GPU"]["median"]
    for title, arm in split["arms"].items():
        peaks = arm["peak_GiB"].values()
        rows.append(_line(f"1 micro-batch, {title}", arm["median"], alone / arm["median"], peaks))
        if title == "one GPU":
            rows += _sequence_lines()
    for base in ("bf16", "fp8"):
        found = result(f"model_split_capacity_offload_{base}_2xH200")
        gib = found["arguments"]["gib"]
        arm = found["arms"][f"offload within {gib} GiB"]
        title = f"1 micro-batch, {base} base, {gib} GiB a GPU, checkpoints offloaded"
        rows.append(_line(title, arm["seconds"][0], alone / arm["seconds"][0], arm["allocated_GiB"].values()))
    for name in ("model_split_lanes_2xH200", "model_split_lanes_4xH200"):
        for count, arm in result(name)["lanes"].items():
            title = f"{count} micro-batches in a pipeline"
            rows.append(_line(title, arm["median"] / int(count), arm["speed_up"], arm["peak_GiB"].values()))
    stream = result("model_split_streaming_2xH200")
    arm, gain = stream["DDP, half streamed"], stream["per_sample_gain_over_one_GPU"]
    seconds = stream["one GPU, nothing offloaded"]["median"] / gain
    rows.append(_line("DDP, half of the frozen base streamed", seconds, gain, [arm["peak_GiB"]] * 2))
    heads = "14B DiT, LoRA r=32, 480x832x49 | GPUs | seconds a micro-batch | against one GPU | peak GiB a GPU"
    return table(heads, rows, f"{split['gpu']}, torch {split['torch']}; the commit of each arm is in its raw result.")


def _line(title: str, seconds: float, ratio: float, peaks: Iterable[float]) -> tuple[object, ...]:
    shown = [f"{value:.1f}" for value in peaks]
    return title, len(shown), f"{seconds:.2f}", f"{ratio:.2f}x", " / ".join(shown)


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
    lines = []
    commits = sorted({commit_of(row) for row in found["rows"] if row["arm"] in ARMS})
    for arm in ARMS:
        rows = [seconds.get((arm, n)) for n in ranks]
        worst = max(row["max_diff"] for row in rows if row)
        lines.append((arm, *(f"{row['seconds']:.2f} s" if row else "" for row in rows), _exactness(worst)))
    where = f"bf16, {found['gpu']}, commits {' and '.join(commits)}: `python benchmarks/vae_decode.py --peers`."
    return table(f"Wan 2.1 VAE, 704x1280, 81 frames | {heads} | equal to diffusers untiled (-1 to 1)", lines, where)


def _exactness(worst: float) -> str:
    return "bit for bit" if worst == 0 else f"within {worst:.2f}"
