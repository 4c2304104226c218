"""README's own short tables: what was gained, which variables there are for a task, and what works in which release."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from wanshim import settings
from wanshim.patching.verdict import Verdict
from wanshim.select import catalog, variables
from wanshim.select.matrix import Matrix, Row
from writers import measured
from writers.markdown import table

FAULTS = "fixes of faults, on by default"
# The abilities that people look for come first; one that is not named here comes after them, by its own name.
ABILITIES = {
    "model_split": "one sample, or one model, on several GPUs",
    "generate": "generate on several GPUs, the script unchanged",
    "strict_blocks": "generate on one GPU with fewer kernels, the same bits",
    "fast_blocks": "generate faster with other bits",
    "vae_decode": "decode on one GPU or several",
    "vae_encode": "encode on one GPU or several",
    "prompt_cache": "negative prompt encoded once",
    "checkpoint_offload": "gradient checkpoints in host memory",
    "kept_attention": "self-attention computed once a step",
    "encode_cache": "latents and prompts encoded once",
    "compiled_blocks": "compiled blocks",
    "eight_bit_compute": "the frozen base multiplies in eight bits",
    "progress": "progress log and monitor",
}
TITLES = {"diffsynth": "DiffSynth-Studio", "fastvideo": "FastVideo", "vllm_omni": "vLLM-Omni", "torch": "PyTorch"}


def first_lines() -> str:
    """What is gained on one GPU, and with four, in README's first lines."""
    held, whole = measured.result("sequence_training_480p_16GiB_gpus1_1xH200"), measured.result(_LOOP.format(1))
    alone, four = whole["median"], measured.result(_LOOP.format(4))["median"]
    decoded = _arms("vae_decode_2.1_1xH200")
    strict, own = decoded["wanshim strict", 1], decoded["diffusers untiled", 1]
    assert strict["max_diff"] == 0
    generated = {row["arm"]: row for row in measured.result("generate_480p_4xH200")["rows"]}
    one, two, on_four = (generated[arm] for arm in ("alone", "cfg:2", "cfg:2,sequence:2"))
    assert two["frames_equal"]
    assert two["latents_equal"]
    return "\n".join(
        [
            f"- **A 14B LoRA step in {held['peak_GiB']:.1f} GiB**: {held['median']:.2f} s on one GPU held to "
            f"{held['gib']:.0f} GiB, with frozen weights, checkpoints and attention in host memory, equal bit for bit. "
            f"DiffSynth-Studio alone takes {alone:.2f} s and {whole['peak_GiB']:.1f} GiB.",
            f"- **One sample on four GPUs**: the step takes {four:.2f} s in place of {alone:.2f} s, "
            f"{alone / four:.2f} times as fast.",
            f"- **A video on two GPUs {two['whole_gain']:.2f} times as fast**: fifty steps of 14B at 480x832x81 take "
            f"{two['whole_call_s']:.0f} s in place of {one['whole_call_s']:.0f} s, the script unchanged, frames equal "
            f"bit for bit. On four GPUs they take {on_four['whole_call_s']:.0f} s, {on_four['whole_gain']:.2f} times.",
            f"- **A decode on one GPU {own['seconds'] / strict['seconds']:.1f} times as fast**: 81 frames of 704x1280 "
            f"take {strict['seconds']:.2f} s in place of {own['seconds']:.2f} s, equal bit for bit.",
        ]
    )


def _arms(record: str) -> dict[tuple[str, int], dict[str, Any]]:
    rows = measured.result(record)["rows"]
    return {(row["arm"], row["ranks"]): row for row in rows if row.get("layout", "2.1") == "2.1" and row["seconds"]}


def gain_table() -> str:
    """Seconds on one GPU without wanshim and with it, on two and four: training one sample first."""
    lines: list[tuple[str, ...]] = []
    alone, *steps = (measured.result(_LOOP.format(count))["median"] for count in (1, 2, 4))
    cells = [f"{alone:.2f} s", "", *(_shown(seconds, alone) for seconds in steps)]
    lines.append(("one LoRA step with **one sample**, 14B DiT, 480x832x49", *cells, "equal up to rounding"))
    kept = measured.result("sequence_training_480p_blocks_2xH200")
    one = measured.result("sequence_training_480p_gpus1_1xH200")
    most = max(kept["peak_GiB"], one["peak_GiB"])
    title = f"the same with blocks kept, on GPUs with {most:.0f} GiB free"
    on_four = measured.result("sequence_training_480p_gpus4_4xH200")["median"]
    shown = (_shown(seconds, alone) for seconds in (one["median"], kept["median"], on_four))
    lines.append((title, f"{alone:.2f} s", *shown, _STEP))
    held, two = (measured.result(f"sequence_training_480p_16GiB_{way}")["median"] for way in ("gpus1_1xH200", "2xH200"))
    title = "the same on GPUs held to 16 GiB, weights streamed"
    lines.append((title, f"{alone:.2f} s", _shown(held, alone), _shown(two, alone), "", _STEP))
    rows = measured.result("training_end_to_end_2xH200")["rows"]
    loop = {(row["way"], row["gpus"], row["videos"]): row for row in rows}
    later = {key: row["epochs"][1]["seconds_a_sample"] for key, row in loop.items()}  # of the second epoch
    ours = (_shown(later["wanshim", gpus, of], later["DiffSynth", 1, of]) for gpus, of in ((1, 4), (2, 8)))
    title = "the same loop from video files, whose VAE and text encoder run in each step; from the second epoch on"
    lines.append((title, f"{later['DiffSynth', 1, 8]:.2f} s", *ours, "", _STEP))
    own, two = (loop[way, gpus, 8]["seconds_with_all_encoding"] for way, gpus in (("DiffSynth", 1), ("wanshim", 2)))
    title = "three epochs of 8 videos of it, setting up included"
    lines.append((title, f"{own:.2f} s", "", _shown(two, own), "", _STEP))
    whole, streamed, *several = (measured.result(name) for name in measured.MINIMAX_H3)
    title = f"one LoRA step of **MiniMax-H3** (32B), 480x832x124 with sound: {whole['peak_GiB']:.0f} GiB, or held to 24"
    shown = (_shown(found["median"], whole["median"]) for found in (streamed, *several))
    bits = "equal bit for bit on one GPU (tests on the CPU), up to rounding on more"
    lines.append((title, f"{whole['median']:.2f} s", *shown, bits))
    lines.append(_generation())
    for verb in ("decode", "encode"):
        found = _arms(f"vae_{verb}_2.1_2xH200"), _arms(f"vae_{verb}_2.1_4xH200")
        own, own_of_four = (arms["diffusers untiled", 1]["seconds"] for arms in found)
        exact = [found[0]["wanshim strict", 1], found[0]["wanshim temporal strict", 2]]
        last = found[1]["wanshim temporal strict", 4]
        assert all(row["max_diff"] == 0 for row in (*exact, last))
        cells = [f"{own:.2f} s", *(_shown(row["seconds"], own) for row in exact), _shown(last["seconds"], own_of_four)]
        lines.append((f"{verb} 81 frames of 704x1280, Wan 2.1 VAE", *cells, "equal bit for bit"))
    split = measured.result("model_split_2xh200")["arms"]
    (whole, half) = (f"{max(split[arm]['peak_GiB'].values()):.1f} GiB" for arm in ("one GPU", "split over 2"))
    lines.append(("memory of a GPU, the same model split by blocks", whole, "", half, "", "equal bit for bit"))
    gpu = measured.result(_LOOP.format(1))["gpu"]
    note = f"{gpu}, bf16. One GPU is the framework alone, without wanshim; ratios are to it in the same record."
    return table("what | 1 GPU | 1 GPU with wanshim | 2 GPUs | 4 GPUs | result", lines, note)


def _generation() -> tuple[str, ...]:
    """A call of fifty steps, guidance over two GPUs, and on four tokens over two more."""
    found = {row["arm"]: row for row in measured.result("generate_480p_4xH200")["rows"]}
    assert found["cfg:2"]["latents_equal"]
    several = (found[arm] for arm in ("cfg:2", "cfg:2,sequence:2"))
    shown = (f"{row['whole_call_s']:.0f} s, **{row['whole_gain']:.2f}x**" for row in several)
    one = {row["arm"]: row for row in measured.result("generate_480p_1xH200")["rows"]}
    assert one["strict_blocks"]["frames_equal"]
    seconds = one["strict_blocks"]["whole_call_s"]
    on_one = f"{seconds:.0f} s, **{one['alone']['whole_call_s'] / seconds:.2f}x**"
    title = "**generate** a video of 480x832x81, 14B, fifty steps with guidance"
    alone = f"{found['alone']['whole_call_s']:.0f} s"
    return title, alone, on_one, *shown, "equal bit for bit, on four GPUs up to rounding"


_LOOP = "sequence_training_480p_{}xH200"  # whole steps of DiffSynth's own loop
_STEP = "equal bit for bit on one GPU, up to rounding on more"


def _shown(seconds: float, alone: float) -> str:
    return f"{seconds:.2f} s, **{alone / seconds:.2f}x**"


def task_table() -> str:
    """The variables by what a user wants to do."""
    lines = []
    for task, page in variables.TASKS.items():
        fields = [field for field, variable in variables.VARIABLES.items() if variable.task == task]
        named = ", ".join(f"`{variables.assignment(field)}`" for field in fields)
        lines.append((f"[{task}](docs/{page})", named))
    return table("you want to | variables", lines)


def variable_table() -> str:
    """Every variable with all that it takes."""
    lines = []
    for task, page in variables.TASKS.items():
        lines += [f"### {task[0].upper()}{task[1:]}", ""]
        lines += [f"Explained in [{page}](docs/{page})." if page != "reference/variables.md" else "", ""]
        own = {field: variable for field, variable in variables.VARIABLES.items() if variable.task == task}
        named = {field: " or ".join(f"`{name}`" for name in settings.names_of(field)) for field in own}
        rows = ((named[field], f"`{variable.example}`", settings.meaning_of(field)) for field, variable in own.items())
        lines += [table("variable | example | meaning", rows), ""]
    return "\n".join(lines[:-1])


def feature_list() -> str:
    """Every feature with what turns it on."""
    lines = []
    for feature in catalog.discover().features.values():
        by = ["on by default"] if feature.auto else [f"`{typed}`" for typed in variables.turn_on(feature)]
        link = f"[`{feature.name}`](docs/features/{feature.name}.md)"
        lines.append((link, feature.summary, " or ".join(by)))
    return table("feature | what it does | turned on by", lines)


def support_table(matrix: Matrix) -> str:
    """Ability by framework: the releases in which wanshim adds it, or since when the framework has it itself."""
    frameworks = [name for name in matrix.declared if name != "torch"]
    known = catalog.discover().features
    abilities = [feature.ability for feature in known.values() if not feature.auto and feature.framework != "torch"]
    ordered = [*(a for a in ABILITIES if a in abilities), *sorted({*abilities} - ABILITIES.keys())]
    heads = " | ".join(["ability", *(TITLES.get(name, name) for name in frameworks)])
    lines = []
    for ability in ordered:
        cells = [_ranges(list(matrix.of(name)), ability) for name in frameworks]
        lines.append((ABILITIES.get(ability, ability), *cells))
    fixes = [[f for f in known.values() if f.auto and f.framework == name] for name in frameworks]
    linked = [", ".join(f"[{f.ability}](docs/features/{f.name}.md)" for f in each) for each in fixes]
    return table(heads, [*lines, (FAULTS, *linked)])


def _ranges(rows: list[Row], ability: str) -> str:
    parts = []
    for verdict, group in groupby(rows, key=lambda row: row.cells[ability].verdict if ability in row.cells else None):
        members = list(group)
        first, last = members[0].version, members[-1].version
        if verdict is Verdict.PATCH:
            parts.append(first if first == last else f"{first} to {last}")
        elif verdict is Verdict.NATIVE and members[-1] is rows[-1]:
            parts.append(f"its own since {first}")
    return ", ".join(parts) or "-"
