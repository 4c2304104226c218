"""The tables of docs/measured/decode.md and reference/vae_models.md: every arm measured, and wanshim's ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from writers import measured
from writers.markdown import table

CLIPS = {"2.1": "2.1 VAE, 704x1280, 81 frames", "2.2": "2.2 VAE, 704x1280, 121 frames"}
IMAGE = {"qwen-image": "Qwen-Image VAE, one image of 2048x2048"}
# In this order within a number of GPUs; an arm that begins like none of these comes last.
ORDER = (
    "diffusers untiled",
    "diffusers tiled",
    "wanshim strict",
    "wanshim temporal strict",
    "wanshim spatial strict",
    "wanshim fast",
    "wanshim temporal",
    "wanshim spatial",
    "wanshim tile",
    "wanshim auto",
    "vLLM-Omni",
    "cache-dit",
)
SHARED = {"fast": ("wanshim temporal", "wanshim spatial"), "strict": ("wanshim temporal strict",)}
ALONE = {"fast": ("wanshim fast",), "strict": ("wanshim strict",)}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """Against the fastest of `arms`; for each kind of operators where `arms` is a mapping.

    Args:
        on_one: these arms run on one GPU, whatever wanshim has; otherwise on as many as wanshim.
        aims: the least ratio that was aimed at, by number of GPUs.
    """

    title: str
    arms: tuple[str, ...] | Mapping[str, tuple[str, ...]]
    aims: Mapping[int, float] = field(default_factory=dict)
    on_one: bool = False


COMPARISONS = (
    Comparison("vLLM-Omni's tile executor", ("vLLM-Omni 0.30 tile executor",), {2: 1.8, 4: 1.8}),
    Comparison(
        "vLLM-Omni's spatial shard, its better axis",
        ("vLLM-Omni 0.30 spatial shard, height", "vLLM-Omni 0.30 spatial shard, width"),
        {2: 1.1, 4: 1.1},
    ),
    Comparison("cache-dit's tiles", ("cache-dit 1.5.3 tiles",)),
    Comparison("wanshim on one GPU, the same operators", ALONE, {2: 1.85, 4: 3.4}, on_one=True),
    Comparison("diffusers untiled on one GPU", ("diffusers untiled",), {1: 1.3}, on_one=True),
)


def arms_tables() -> str:
    """Every arm of a decode, a table a layout."""
    return _tables({layout: measured.result(f"vae_decode_{layout}") for layout in CLIPS})


def engine_tables() -> str:
    """The arms of runs on two GPUs by the fastest of cuDNN's engines, and of one on four, a table a layout."""
    return _tables({layout: _with_four("decode", measured.result(f"vae_decode_{layout}_2xH200")) for layout in CLIPS})


def _with_four(verb: str, record: dict[str, Any]) -> dict[str, Any]:
    """A record on two GPUs with the arms of the one on four, where there is one."""
    name = f"vae_{verb}_{record['rows'][0]['layout']}_4xH200"
    if not (measured.RESULTS / f"{name}.json").exists():
        return record
    four = measured.result(name)
    return {**record, "rows": [*record["rows"], *({"commit": four["commit"], **row} for row in four["rows"])]}


def winograd_tables() -> str:
    """The arms of a run on one GPU whose fast decode has Winograd's convolution, a table a layout."""
    return _tables({layout: measured.result(f"vae_decode_{layout}_1xH200") for layout in CLIPS})


def encode_tables() -> str:
    """Every arm of an encode, a table a layout."""
    if not (measured.RESULTS / "vae_encode.json").exists():
        return "No run on GPUs is recorded yet."
    return _encode_tables(dict.fromkeys(CLIPS, "vae_encode"))


def encode_engine_tables() -> str:
    """The arms of an encode on two and four GPUs by the fastest of cuDNN's engines, a table a layout."""
    return _encode_tables({layout: f"vae_encode_{layout}_2xH200" for layout in CLIPS}, engines=True)


def _encode_tables(names: Mapping[str, str], *, engines: bool = False) -> str:
    records = {layout: measured.result(name) for layout, name in names.items()}
    chosen = {
        layout: {**record, "rows": [row for row in record["rows"] if row["layout"] == layout]}
        for layout, record in records.items()
    }
    return _tables({layout: _with_four("encode", record) if engines else record for layout, record in chosen.items()})


def image_table() -> str:
    """Every arm of the decode of an image."""
    if not (measured.RESULTS / "vae_decode_image.json").exists():
        return "No run on GPUs is recorded yet: `python benchmarks/vae_decode.py --layouts qwen-image`."
    return _tables({layout: measured.result("vae_decode_image") for layout in IMAGE})


def vllm_omni_table() -> str:
    """vLLM-Omni's VAEs on one GPU, beside its own fast path."""
    record = measured.result("vllm_omni_vae_1xH100")
    names = {"eager": "vLLM-Omni's modules", "lossless": "its lossless fast path", "strict": "strict", "fast": "fast"}
    lines = []
    for row in record["rows"]:
        same = "" if row["arm"] == "eager" else "equal" if row["equal"] else f"{row['most']:.3f}"
        lines.append((f"{row['layout']} {row['verb']}", names[row["arm"]], f"{row['seconds']:.2f}", same))
    on = f"{record['gpu']}, torch {record['torch']}, commit {measured.commit_of(record)}."
    about = f"vLLM-Omni {record['vllm-omni']}, {on}"
    heads = "VAE | by | seconds | its modules' bits, or the largest difference"
    return table(heads, lines, f"704x1280, 2.1: 81 frames, 2.2: 121; bf16; {about}")


ARM = "arm | GPUs | seconds | peak GiB per rank | predicted | largest difference | commit"


def _tables(records: Mapping[str, dict[str, Any]]) -> str:
    lines = []
    for layout, record in records.items():
        clip = {**CLIPS, **IMAGE}[layout]
        lines += [
            f"**{clip}**, bf16, {record['gpu']}, torch {record['torch']}, diffusers {record['diffusers']}",
            "",
            table(ARM, map(_line, sorted(_rows(record), key=_place))),
            "",
        ]
    return "\n".join(lines[:-1])


def _place(row: dict[str, Any]) -> tuple[int, int, str]:
    arm = row["arm"]
    known = (place for place, begin in enumerate(ORDER) if arm.startswith(begin))
    return row["ranks"], next(known, len(ORDER)), arm


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    cells = row["arm"], str(row["ranks"]), f"{row['seconds']:.3f}", f"{max(row['peak']):.2f}"
    predicted = f"{max(row['predicted']):.2f}" if row["predicted"] else ""
    difference = "0" if row["max_diff"] == 0 else f"{row['max_diff']:.3f}"
    return *cells, predicted, difference, measured.commit_of(row)


def ratios_table() -> str:
    """How many times as fast as each other decode, by GPUs and operators, for both layouts."""
    layouts = [_rows(measured.result(f"vae_decode_{layout}")) for layout in CLIPS]
    gpus = sorted({row["ranks"] for rows in layouts for row in rows})
    heads = [f"{count} GPU{'s' * (count > 1)}, {kind}" for count in gpus for kind in ALONE]
    lines = []
    for comparison in COMPARISONS:
        cells = [_cell(layouts, comparison, count, kind) for count in gpus for kind in ALONE]
        lines.append((comparison.title, _aims(comparison.aims), *cells))
    note = "Each cell: 2.1 / 2.2, cut after two digits; in bold what is below its aim. Both of one run where both ran."
    return table(f"times as fast as | aim | {' | '.join(heads)}", lines, note)


def _rows(record: dict[str, Any]) -> Rows:
    """The arms that were measured."""
    return [row for row in record["rows"] if row["seconds"]]


def _cell(layouts: list[Rows], comparison: Comparison, gpus: int, kind: str) -> str:
    ratios = [_ratio(rows, comparison, gpus, kind) for rows in layouts]
    if not any(ratios):
        return ""
    return " / ".join(_shown(ratio, comparison.aims.get(gpus, 0)) for ratio in ratios)


def _ratio(rows: Rows, comparison: Comparison, gpus: int, kind: str) -> float | None:
    """None where one of both was not measured, and of an arm against itself."""
    ours = ALONE[kind] if gpus == 1 else SHARED[kind]
    theirs = comparison.arms[kind] if isinstance(comparison.arms, Mapping) else comparison.arms
    if gpus == 1 and theirs == ours:
        return None
    own = _fastest(rows, ours, gpus, None)
    other = _fastest(rows, theirs, 1 if comparison.on_one else gpus, own)
    return other["seconds"] / own["seconds"] if own and other else None


def _fastest(rows: Rows, arms: tuple[str, ...], gpus: int, beside: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of the run that `beside` is of, if it has one of these arms."""
    found = [row for row in rows if row["arm"] in arms and row["ranks"] == gpus]
    same = [row for row in found if beside and row["commit"] == beside["commit"]]
    return min(same or found, key=lambda row: row["seconds"], default=None)


def _shown(ratio: float | None, aim: float) -> str:
    if ratio is None:
        return "-"
    cut = f"{math.floor(ratio * 100) / 100:.2f}"
    return f"**{cut}**" if ratio < aim else cut


def _aims(aims: Mapping[int, float]) -> str:
    """By GPUs, where they are not all the same."""
    if len(set(aims.values())) == 1 and len(aims) > 1:
        return str(next(iter(aims.values())))
    return ", ".join(f"{aim} on {gpus}" for gpus, aim in aims.items())
