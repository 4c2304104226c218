"""The table of docs/measured/decode.md for cards with little memory left."""

from __future__ import annotations

from typing import Any

from writers import measured
from writers.markdown import table

ARMS = ("diffusers", "auto strict", "auto fast", "tile strict", "tile fast")
VIDEO = "704x1280, 2.1: 81 frames, 2.2: 121; Qwen-Image: one picture of 2048x2048; bf16"


def memory_table() -> str:
    """Seconds and peak of decodes and encodes by the GiB that are free, or why there are none."""
    found = measured.result("vae_memory_1xH100")
    tiles = measured.result("vae_memory_1xH200")  # of the 2.1 VAE, whose tiles were not measured on the H100
    rows = [*found["rows"], *({**row, "on": " (H200)"} for row in tiles["rows"] if row["arm"].startswith("tile"))]
    lines: dict[tuple[str, float], dict[str, str]] = {}
    for row in rows:
        name = f"{row['layout']} {row['verb']}{row.get('on', '')}"
        lines.setdefault((name, row["free_GiB"]), {})[row["arm"]] = cell(row)
    cells = ((name, f"{free:.0f}", *(lines[name, free].get(arm) for arm in ARMS)) for name, free in sorted(lines))
    commits = sorted({measured.commit_of(row) for row in found["rows"]})
    on = f"{found['gpu']}, torch {found['torch']}, commits {', '.join(commits)}; H200: {measured.commit_of(tiles)}."
    return table(f"VAE | GiB free | {' | '.join(ARMS)}", cells, f"{VIDEO}; {on}")


def cell(row: dict[str, Any]) -> str:
    """Seconds and peak of a later call."""
    if row["failure"].startswith("OutOfMemory"):
        return "out of memory" + (" in the second call" if row["first"] is not None else "")
    if row["failure"]:
        return "refused"
    peaks = row.get("peaks_GiB", [])[1:]  # older rows have the first call's too in one number
    peak = f"{max(peaks):.1f} GiB" if peaks else f"up to {row['peak_GiB']:.1f} GiB"
    by_tiles = " by tiles" if row["arm"].startswith("auto") and row["plan"].startswith("tile") else ""
    return f"{row['seconds']:.2f} s, {peak}{by_tiles}"
