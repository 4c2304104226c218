"""The tables of docs/measured/generation.md, and what share of a call its decode has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from writers.markdown import table
from writers.measured import commit_of, result

RECORDS = tuple(f"generate_{size}_{gpus}xH200" for gpus in (2, 4) for size in ("480p", "720p"))
ON_TWO = RECORDS[:2]
SCRIPTS = tuple(f"generate_script_{gpus}xH200" for gpus in (2, 1, 4))
SMALL = "generate_script_small_1xH200"
OFFLOAD = "generate_offload_2xH200"
LIMITS = "generate_limits_2xH200", "generate_limits_1xH200", "generate_script_diffsynth_1xH200"
BLOCKS = "strict_blocks_1xH200", "strict_blocks_diffsynth_1xH200", "strict_blocks_qwen_image_1xH200"
MINIMAX_H3 = "generate_script_minimax_h3_1xH200"
WHOLE = tuple(f"generate_full_{gpus}xH200" for gpus in (1, 2, 4))
TITLES = {
    "alone": "diffusers on one GPU",
    "cfg:2": "**wanshim**, guidance over 2",
    "sequence:2": "wanshim, tokens over 2",
    "cfg:2,sequence:2": "**wanshim**, guidance over 2, tokens over 2",
    "sequence:4": "wanshim, tokens over 4",
    "ulysses": "diffusers' context parallel, Ulysses",
    "ring": "diffusers' context parallel, ring",
    "usp": "DiffSynth-Studio's `use_usp`",
    "xdit": "xDiT 0.7",
}


def generation_table() -> str:
    """Each way over two and four GPUs, of one GPU in the same run."""
    lines = []
    for found in map(result, RECORDS):
        for row in sorted(found["rows"], key=lambda row: row["seconds_per_step"]):
            seconds, whole = row["seconds_per_step"], row["whole_call_s"]
            equal = "equal" if row["latents_equal"] else f"{row['max_diff']:.2f} apart"
            cells = (f"{seconds:.2f}", f"{row['gain']:.2f}x", f"{whole:.0f}", equal, f"{max(row['peak_GiB']):.1f}")
            commit = commit_of(row if "commit" in row else found)
            lines.append((found["size"], len(row["peak_GiB"]), TITLES[row["arm"]], *cells, commit))
    heads = "video | GPUs | way | seconds a step | of one GPU | seconds a call | latents | peak GiB of a GPU | commit"
    return table(heads, lines, _where(RECORDS))


def whole_table() -> str:
    """Calls of fifty steps that were run in full."""
    found = list(map(result, WHOLE))
    alone = found[0]["rows"][0]
    lines = []
    for record in found:
        (row,) = record["rows"]
        seconds = row["call_s"]
        equal = "equal" if row["frames_sha256"] == alone["frames_sha256"] else "not equal"
        cells = (f"{seconds:.1f}", f"{alone['call_s'] / seconds:.2f}x", f"{row['after_s']:.1f}", equal)
        lines.append((record["size"], len(row["peak_GiB"]), TITLES[row["arm"]], *cells))
    heads = "video | GPUs | way | seconds of the call | of one GPU | of them its decode | frames"
    return table(heads, lines, _where(WHOLE, ""))


def blocks_table() -> str:
    """One forward, the blocks' steps by the framework and by one kernel each. Of a size measured twice, the later."""
    records = [result(name) for name in BLOCKS]
    names = {"diffusers": "diffusers", "diffsynth": "DiffSynth-Studio", "qwen_image": "diffusers, Qwen-Image"}
    rows = {(row["framework"], row["size"]): row for found in records for row in found["rows"]}
    lines = [
        (
            names[row["framework"]],
            row["size"],
            f"{row['alone_s']:.3f}",
            f"{row['strict_s']:.3f}",
            f"{row['ratio']:.2f}x",
            "equal" if row["equal"] else "not equal",
        )
        for row in rows.values()
    ]
    gpus = {f"{r['gpu']}, torch {r['torch']}" for r in records}
    commits = ", ".join(dict.fromkeys(map(commit_of, records)))
    where = f"{' and '.join(gpus)}, Wan 14B and Qwen-Image 20B, bf16, commits {commits}."
    return table("framework | video | seconds alone | with wanshim | | values", lines, where)


FAST = {
    "alone": "diffusers",
    "fast": "`wanshim generate --gpus 1 --fast`",
    "compiled": "diffusers, `compile_repeated_blocks()`",
    "torchao_float8": "diffusers, torchao's float8",
}


def fast_table() -> str:
    """Guided steps of one GPU, exact and with what changes bits."""
    lines, commits = [], []
    for name in ("generate_fast_480p_1xH200", "generate_fast_720p_1xH200"):
        found = result(name)
        commits.append(commit_of(found))
        for row in found["rows"]:
            if "failed" in row:
                lines.append((found["size"], FAST[row["arm"]], row["failed"], *[""] * 6))
                continue
            notes = row.get("diffusers.fast_blocks", {}).get("notes", [])
            apart = notes[-1].split(" is ")[-1].split(" off ")[0] if notes else ""
            first = max(row["step_seconds"])
            steps = f"{first:.2f}", f"{row['seconds_per_step']:.2f}", f"{row['gain']:.2f}x"
            whole = f"{row['whole_call_s']:.0f} ({row['whole_gain']:.2f}x)"
            cells = (*steps, f"{row['after_s']:.2f}", whole, apart, f"{row['peak_GiB'][0]:.1f}")
            lines.append((found["size"], FAST[row["arm"]], *cells))
    heads = "video | | first step, s | a step, s | | decode, s | fifty and decode, s | first forward off | peak GiB"
    where = f"{found['gpu']}, torch {found['torch']}, diffusers {found['diffusers']}, {found['model']}, bf16"
    return table(heads, lines, f"{where}, commits {', '.join(commits)}. Fifty steps: of the second of two.")


def script_table() -> str:
    """A user's script of three calls, alone and by its command lines with wanshim."""
    lines = [
        (*cells, _frames(row, alone), commit_of(found))
        for found in map(result, SCRIPTS)
        for row, alone, cells in _script_rows(found)
    ]
    heads = "command | first call | second call | of the script alone | third call, 272x480x33 | frames | commit"
    return table(heads, lines, _where(SCRIPTS, " Seconds with the decode."))


def small_table() -> str:
    """A user's script with a small model, alone and with wanshim on one GPU."""
    lines = [
        (*cells, f"{row['calls'][1]['peak_GiB']:.1f}", _frames(row, alone))
        for row, alone, cells in _script_rows(result(SMALL))
    ]
    heads = "command | first call | second call | of one not offloaded | third call | GiB in the second | frames"
    return table(heads, lines, _where((SMALL,), " Seconds with the decode."))


def _script_rows(found: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]]:
    """Each row of a script's record, that of the script alone before it, and the cells of its command and calls."""
    alone: dict[str, Any] = {}
    for row in found["rows"]:
        if row["command"].startswith("python"):  # what follows is compared with it
            alone = row
        first, second, other = (call["seconds"] for call in row["calls"])
        command = row["command"].replace("benchmarks/generate_script.py", "...")
        ratio = alone["calls"][1]["seconds"] / second
        yield row, alone, (f"`{command}`", f"{first:.1f}", f"{second:.1f}", f"{ratio:.2f}x", f"{other:.1f}")


def offload_table(name: str) -> str:
    """A user's script whose models do not fit, by its own offload and streamed by wanshim."""
    found = result(name)
    third = "x".join(map(str, found["rows"][0]["calls"][2]["size"]))
    lines = []
    for row in found["rows"]:
        seconds = (f"{call['seconds']:.1f}" for call in row["calls"])
        peak = max(call["peak_GiB"] for call in row["calls"])
        predicted = f"{row['predicted_GiB']:.2f}" if "predicted_GiB" in row else ""
        command = re.sub(r"benchmarks/\w+\.py", "...", row["command"])
        lines.append((f"`{command}`", *seconds, f"{peak:.2f}", predicted, _frames(row, found["rows"][0])))
    heads = f"command | first call | second call | third call, {third} | peak GiB | predicted | frames"
    return table(heads, lines, _where((name,), f" {found['steps']} steps, seconds with the decode."))


def limits_table() -> str:
    """Calls of scripts whose models do not fit, most within a limit of their own."""
    records = list(map(result, LIMITS))
    rows = [row for found in records for row in found["rows"]]

    def video(row: dict[str, Any], call: dict[str, Any]) -> tuple[Any, ...]:
        return "diffsynth" in row["command"], "--pair" in row["command"], *call["size"]

    alone = [row for row in rows if row["command"].startswith("python")]
    expected = {video(row, call): call["frames"] for row in alone for call in row["calls"]}
    lines = []
    for row in rows:
        command = re.sub(r"benchmarks/generate_script(_\w+)?\.py", r"...\1", row["command"])
        limit = re.search(r"--limit ([\d]+)", row["command"])
        for call in row["calls"]:
            own = expected.get(video(row, call))
            frames = "not compared" if own is None else "equal" if call["frames"] == own else "not equal"
            within = f"{call['limit_GiB']:.0f}" if call.get("limit_GiB") else limit[1] if limit else ""
            size = "x".join(map(str, call["size"]))
            lines.append((f"`{command}`", size, within, f"{call['seconds']:.1f}", f"{call['peak_GiB']:.2f}", frames))
    heads = "command | video | within GiB | seconds of a call | peak GiB | frames"
    commits = ", ".join(dict.fromkeys(map(commit_of, rows)))
    first, last = records[0], records[-1]
    where = f"{first['gpu']}, torch {first['torch']}, diffusers {first['diffusers']}, diffsynth {last['diffsynth']}"
    return table(heads, lines, f"{where}, commits {commits}. {first['steps']} steps, with the decode.")


def host_copy_table() -> str:
    """Two processes on one GPU that stream from one copy in host memory."""
    found = result("shared_host_copy_1xH200")
    lines = []
    for row in found["rows"]:
        resident = " + ".join(f"{each['Rss']:.1f}" for each in row["host_GiB"])
        cells = f"{row['sum_of_Pss_GiB']:.1f}", f"{row['pinned_GiB']:.1f}", f"{row['calls'][1]['seconds']:.1f}"
        lines.append((row["processes"], resident, *cells, commit_of(row)))
    heads = "processes | resident GiB of each | GiB of the host, a shared page once | locked | second call, s | commit"
    return table(
        heads, lines, f"{found['gpu']}, torch {found['torch']}, diffusers {found['diffusers']}, Wan 14B, bf16."
    )


def _frames(row: dict[str, Any], alone: dict[str, Any]) -> str:
    """Whether the frames of each call are those of the script alone."""
    pairs = zip(row["calls"], alone["calls"], strict=True)
    return "equal" if all(one["frames"] == own["frames"] for one, own in pairs) else "not equal"


def worker_table() -> str:
    """What wanshim's workers cost and take."""
    lines = []
    for found in map(result, RECORDS):
        for row in found["rows"]:
            if "start_s" not in row:
                continue
            start = f"{row['start_s']:.1f} + {row['weights_s']:.1f}"
            first, most, predicted = (
                f"{gib:.1f}" for gib in (row["peak_GiB"][0], max(row["peak_GiB"][1:]), max(row["predicted_GiB"]))
            )
            cells = (f"`{row['arm']}`", start, f"{row['recheck_s']:.1f}", first, most, predicted)
            lines.append((found["size"], len(row["peak_GiB"]), *cells))
    heads = "video | GPUs | over | seconds to start + to have the weights | to look for changes"
    heads += " | peak GiB of the script's GPU | of a worker's | predicted, of forwards"
    return table(heads, lines, _where(RECORDS))


def share_table() -> str:
    """What share of a call of diffusers' pipeline its decode has on one GPU, by size and steps."""
    lines = []
    for found in map(result, ON_TWO):
        alone = found["rows"][0]
        for steps, forwards in ((50, 2), (20, 2), (4, 1)):
            denoising = steps * alone["seconds_per_step"] * forwards / 2
            call = denoising + alone["after_s"]
            title = f"{steps}{'' if forwards == 2 else ', without guidance'}"
            cells = (f"{call:.0f} s", f"{alone['after_s']:.1f} s", f"{alone['after_s'] / call:.1%}")
            lines.append((found["size"], title, *cells))
    return table("video, 14B | steps | a call | its decode | share", lines, _where(ON_TWO))


def _where(
    names: Sequence[str], computed: str = " Calls of fifty steps are computed from the steps that were timed."
) -> str:
    found: list[dict[str, Any]] = [result(name) for name in names]
    commits = " and ".join(dict.fromkeys(commit_of(each) for each in found))
    first = found[0]
    framework = f"diffusers {first['diffusers']}" if "diffusers" in first else f"diffsynth {first['diffsynth']}"
    return f"{first['gpu']}, torch {first['torch']}, {framework}, commit {commits}.{computed}"
