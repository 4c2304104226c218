"""The tables of what is paid once: first calls on a machine, strict's comparison, and the state of a training."""

from __future__ import annotations

from typing import Any

from writers.markdown import table
from writers.measured import result, where


def first_call_table() -> str:
    """Seconds of the first calls of a process and of another size's, beside diffusers'."""
    names = ("first_call_1xH100", "first_call_encode_1xH100", "first_call_22_1xH100", "first_call_encode_22_1xH100")
    records = [result(name) for name in names]
    (measured,) = {where(found) for found in records}
    lines = [_calls(row) for found in records for row in found["rows"]]
    heads = "VAE | seconds of call | 1 | 2 | 3 | another size, 1 | 2"
    sizes = "704x1280, then 528x960 (2.2: 512x960); 2.1: 81 frames, 2.2: 121"
    return table(heads, lines, f"{sizes}; {measured}")


def dry_run_table() -> str:
    """The first calls with kernels from a dry run, and from the table that it has replaced."""
    found = result("first_call_dry_run_1xH200")
    lines = [(*_calls(row, f", by {row['by']}"), row["commit"][:7]) for row in found["rows"]]
    heads = "VAE | seconds of call | 1 | 2 | 3 | another size, 1 | 2 | commit"
    return table(heads, sorted(lines), f"Sizes as above; {found['gpu']}, torch {found['torch']}.")


def _calls(row: dict[str, Any], way: str = "") -> tuple[str, ...]:
    """The VAE and verb of a row, its arm, and the seconds of each call, with those that were left to the framework."""
    name = row["arm"] if row["arm"] == "diffusers" else f"{row['arm']}, {row['process']} process{way}"
    cells = (f"{seconds:.2f}{' (left)' if each else ''}" for seconds, each in zip(row["seconds"], row["left"]))
    return f"{row['layout']} {row['verb']}", name, *cells


def service_table() -> str:
    """Twenty sizes in turn, three rounds of them, in one process on a machine that knows nothing."""
    found = result("first_call_service_1xH200")
    count = len(set(found["calls"]))
    lines = []
    for row in found["rows"]:
        seconds = row["seconds"]
        rounds = [sum(seconds[start : start + count]) for start in range(0, len(seconds), count)]
        lines.append((row["arm"], *(f"{each:.1f}" for each in rounds), f"{sum(seconds):.1f}", sum(row["left"])))
    heads = "decodes of 20 sizes | round 1 | round 2 | round 3 | all, in seconds | calls left to the framework"
    return table(heads, lines, f"2.1, 33 frames of 528x960 to 656x1264; {where(found)}")


def proof_table() -> str:
    """What strict's comparison with the framework's own takes."""
    found = result("strict_proof_1xH100")
    lines = []
    for row in found["rows"]:
        call = f"{row['layout']} {row['verb']}, 704x1280, {81 if row['layout'] == '2.1' else 121} frames"
        shares = (f"{row['first_comparing_s']:.2f} s of {row['first_s']:.2f} s", row["compared"])
        lines.append((call, *shares, f"{row['later_comparing_s']:.0f} s", row["calls_until_the_next"]))
    heads = "call | comparing, in the first call | what is compared | in later calls | calls until the next comparison"
    return table(heads, lines, where(found))


def resume_table() -> str:
    """What saving a state takes of a training."""
    found = result("resume_1xH200")
    longer, starts = found["step_that_saves_longer_s"], found["first_step_s"]
    lines = [
        ("a step that saves is longer by", f"{longer['median']:.2f} s, at most {longer['max']:.2f} s"),
        ("of ten minutes", f"{found['share_of_ten_minutes']:.3%}"),
        ("writing, beside training", f"{min(found['write_s']):.1f} to {max(found['write_s']):.1f} s"),
        ("host memory", f"{found['host_memory_GiB']:.2f} GiB, predicted: {found['predicted']}"),
        ("until the first step has ended, from a state", f"{starts['from_a_state']:.1f} s"),
        ("the same without a state", f"{starts['cold']:.1f} s"),
    ]
    frames = "{height}x{width}x{frames}".format(**found["arguments"])
    return table("14B, LoRA of rank 32 | measured", lines, f"{frames}, {len(found['copy_s'])} states; {where(found)}")
