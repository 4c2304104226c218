"""The identity of a run under DiffSynth's loop: what has to be the same for it to go on from its state."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from wanshim.adapters.diffsynth.training_road import Run
from wanshim.core.resume.identity import SAMPLED, contents_of, differences, digest_of, fingerprint, table
from wanshim.core.resume.state import newest_facts
from wanshim.core.training.progress_log import run_folder
from wanshim.errors import ResumeInvalid
from wanshim.settings import WantedResume

FOLDER = "training_state"  # in the run's output folder
FILES = "files_of_dataset"  # the entry of an identity

# Where the result lies, and what describes no run.
NOT_COMPARED = ("output_path", "args", "accelerator", "dataset", "model", "model_logger", "kwargs")
NOT_ACCEPTED = ("trained_weights", "samples_per_step", "optimizer")  # a state of other ones cannot be loaded


parsed_arguments: dict[
    str, Any
] = {}  # the arguments as the script's parser gave them; the script may change them later


def states_of(wanted: WantedResume, output_path: str | Path) -> Path:
    """The folder of a run's states."""
    folder = run_folder(Path(wanted.folder), output_path) if wanted.folder else Path(output_path, FOLDER)
    return folder.resolve()


def where(wanted: WantedResume) -> str:
    """The place of the states as WANSHIM_RESUME names it."""
    return str(Path(wanted.folder).resolve()) if wanted.folder else "auto"


def anew(wanted: WantedResume) -> str:
    """The hint that begins another run."""
    value = f"{where(wanted)},+new" if wanted.folder else "new"
    return f"WANSHIM_RESUME={value} begins a run of its own beside it"


def refusal(changed: dict[str, tuple[Any, Any]], wanted: WantedResume, run: Path) -> str | None:
    """Why these differences are not accepted, or None."""
    if all(name in wanted.accepted and name not in NOT_ACCEPTED for name in changed):
        return None
    return f"This run is not the one whose state is in {run}:\n{table(changed)}\n"


def check_arguments(given: object, wanted: WantedResume) -> None:
    """Note the arguments that a parser has read, and compare them with those of the newest state.

    Raises:
        ResumeInvalid: they differ, and the difference is not accepted.
    """
    parsed_arguments.clear()
    parsed_arguments.update(arguments_of(given))
    output, found = getattr(given, "output_path", None), None
    with suppress(ResumeInvalid):  # of the folder: the training call says what is wrong with it
        found = newest_facts(states_of(wanted, output)) if output and not wanted.anew else None
    path, facts = found or (Path(), None)
    if facts is None:
        return
    saved = facts.get("arguments", {})
    compared = [name for name in facts["identity"] if name in saved and name in parsed_arguments]
    changed = differences({n: saved[n] for n in compared}, {n: parsed_arguments[n] for n in compared})
    if reason := refusal(changed, wanted, path.parent):
        accepting = ",".join([where(wanted), *("+" + name for name in changed)])
        condition = "if the trained weights, the optimizer and the samples of a step stay the same"
        raise ResumeInvalid(reason, hint=f"WANSHIM_RESUME={accepting} goes on nevertheless {condition}; {anew(wanted)}")


def arguments_of(given: object) -> dict[str, Any]:
    """The arguments of a script that say what its run is, of JSON."""
    return {name: value for name, value in vars(given).items() if name not in NOT_COMPARED and _is_plain(value)}


def identity_of(run: Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By name, of JSON: the script's arguments, how blocks compute, samples a step, dataset and weights."""
    call = run.call
    given = call.script if call.script is not None else SimpleNamespace(**call.options)
    named = list(call.model.named_parameters())
    trained = [(name, weight) for name, weight in named if weight.requires_grad]
    processes, accumulation = call.accelerator.num_processes, call.accelerator.gradient_accumulation_steps
    return {
        **arguments_of(given),
        **run.plan.block_changes,
        "WANSHIM_BASE": run.read.base,
        "mixed_precision": call.accelerator.mixed_precision,  # of `accelerate launch`, no argument of the script
        "dataset": samples_of(call.dataset),
        FILES: files_of(call.dataset),
        "base_model": fingerprint([(name, weight) for name, weight in named if _stays(name, weight)], values=True),
        "trained_weights": f"{len(trained)} tensors, {fingerprint(trained, values=False)}",
        "samples_per_step": f"{processes * accumulation}: {processes} x {accumulation} accumulated",
        "optimizer": type(optimizer).__name__,
    }


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def samples_of(dataset: Any) -> str:
    """The identity of a dataset: its rows, or the files of `--task sft:data_process`, whose names say nothing of what
    was encoded, with their contents."""
    files = [getattr(dataset, name, None) for name in ("data", "cached_data")]  # of DiffSynth's UnifiedDataset
    encoded = files[1]
    if isinstance(encoded, list) and encoded and all(isinstance(each, (str, Path)) for each in encoded):
        files.append([contents_of(Path(path)) for path in encoded[:: -(-len(encoded) // SAMPLED)]])
    return f"{len(dataset)} samples of {type(dataset).__name__}, {digest_of(files)}"


def files_of(dataset: Any) -> str:
    """Files that the rows of DiffSynth's UnifiedDataset name, by their contents: a video counts by its size."""
    rows, keys = getattr(dataset, "data", None), getattr(dataset, "data_file_keys", ())
    some = rows[:: -(-len(rows) // SAMPLED)] if isinstance(rows, list) and rows else []
    values = [row[key] for row in some if isinstance(row, dict) for key in keys if key in row]
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    folder = Path(getattr(dataset, "base_path", None) or "")
    found = [contents_of(folder / name) for name in names if isinstance(name, str)]
    return f"{len(found)} files, {digest_of(found)}"


def changes(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The differences of two identities. States of an earlier release do not have FILES."""
    return differences(saved, {name: value for name, value in now.items() if name != FILES or name in saved})


def _stays(name: str, weight: torch.Tensor) -> bool:
    """Whether a frozen weight is the same object under every plan: blocks are streamed, or stored in eight bits."""
    plain = type(weight) is torch.nn.Parameter and not weight.is_meta
    return plain and not weight.requires_grad and "blocks" not in name
