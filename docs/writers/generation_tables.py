"""The tables of docs/measured/generation.md, and what share of a call its decode has."""

from __future__ import annotations

from typing import Any

from writers.markdown import table
from writers.measured import commit_of, result

RECORDS = ("generate_480p_2xH200", "generate_720p_2xH200")
TITLES = {
    "alone": "diffusers on one GPU",
    "cfg:2": "**wanshim**, guidance over 2",
    "sequence:2": "wanshim, tokens over 2",
    "ulysses": "diffusers' context parallel, Ulysses",
    "ring": "diffusers' context parallel, ring",
    "usp": "DiffSynth-Studio's `use_usp`",
    "xdit": "xDiT 0.7",
}


def generation_table() -> str:
    """Each way over two GPUs, of one GPU in the same run."""
    lines = []
    for found in map(result, RECORDS):
        alone = found["rows"][0]["seconds_per_step"]
        for row in sorted(found["rows"], key=lambda row: row["seconds_per_step"]):
            seconds, whole = row["seconds_per_step"], row["whole_call_s"]
            equal = "equal" if row["latents_equal"] else f"{row['max_diff']:.2f} apart"
            peaks = " / ".join(f"{gib:.1f}" for gib in row["peak_GiB"])
            cells = (f"{seconds:.2f}", f"{alone / seconds:.2f}x", f"{whole:.0f}", equal, peaks)
            lines.append((found["size"], TITLES[row["arm"]], *cells))
    heads = "video | way | seconds a step | of one GPU | seconds a call | latents | peak GiB a GPU"
    return table(heads, lines, _where())


def worker_table() -> str:
    """What wanshim's workers cost and take."""
    lines = []
    for found in map(result, RECORDS):
        for row in found["rows"]:
            if "start_s" not in row:
                continue
            start = f"{row['start_s']:.1f} + {row['weights_s']:.1f}"
            predicted = " / ".join(f"{gib:.1f}" for gib in row["predicted_GiB"])
            peaks = " / ".join(f"{gib:.1f}" for gib in row["peak_GiB"])
            lines.append((found["size"], row["arm"], start, f"{row['recheck_s']:.1f}", peaks, predicted))
    heads = "video | over | seconds to start + to have the weights | to look for changes | peak GiB a GPU"
    heads += " | predicted, of forwards"
    return table(heads, lines, _where())


def share_table() -> str:
    """What share of a call of diffusers' pipeline its decode has on one GPU, by size and steps."""
    lines = []
    for found in map(result, RECORDS):
        alone = found["rows"][0]
        for steps, forwards in ((50, 2), (20, 2), (4, 1)):
            denoising = steps * alone["seconds_per_step"] * forwards / 2
            call = denoising + alone["after_s"]
            title = f"{steps}{'' if forwards == 2 else ', without guidance'}"
            cells = (f"{call:.0f} s", f"{alone['after_s']:.1f} s", f"{alone['after_s'] / call:.1%}")
            lines.append((found["size"], title, *cells))
    return table("video, 14B | steps | a call | its decode | share", lines, _where())


def _where() -> str:
    found: list[dict[str, Any]] = [result(name) for name in RECORDS]
    commits = " and ".join(dict.fromkeys(commit_of(each) for each in found))
    return (
        f"{found[0]['gpu']}, torch {found[0]['torch']}, diffusers {found[0]['diffusers']}, commit {commits}. "
        "Calls of fifty steps are computed from the steps that were timed."
    )
