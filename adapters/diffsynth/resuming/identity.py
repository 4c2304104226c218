"""What a run under DiffSynth's loop is: what has to be the same for it to go on from its state."""

from __future__ import annotations

import json
from typing import Any

import torch

from wanshim.adapters.diffsynth.training_road import Run
from wanshim.core.resume.identity import digest_of, fingerprint

# Where the result lies, and what describes no run.
NOT_COMPARED = ("output_path", "args", "accelerator", "dataset", "model", "model_logger", "kwargs")
NOT_ACCEPTED = ("trained_weights", "samples_per_step", "optimizer")  # a state of other ones cannot be loaded


def identity_of(run: Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By name, of JSON: the script's arguments, how blocks compute, samples a step, dataset and weights."""
    call = run.call
    given = vars(call.script) if call.script is not None else call.options
    named = list(call.model.named_parameters())
    trained = [(name, weight) for name, weight in named if weight.requires_grad]
    processes, accumulation = call.accelerator.num_processes, call.accelerator.gradient_accumulation_steps
    return {
        **{name: value for name, value in given.items() if name not in NOT_COMPARED and _is_plain(value)},
        **run.plan.block_changes,
        "WANSHIM_BASE": run.read.base,
        "mixed_precision": call.accelerator.mixed_precision,  # of `accelerate launch`, no argument of the script
        "dataset": _samples(call.dataset),
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


def _samples(dataset: Any) -> str:
    files = [getattr(dataset, name, None) for name in ("data", "cached_data")]  # of DiffSynth's UnifiedDataset
    return f"{len(dataset)} samples of {type(dataset).__name__}, {digest_of(files)}"


def _stays(name: str, weight: torch.Tensor) -> bool:
    """Whether a frozen weight is the same object under every plan: blocks are streamed, or stored in eight bits."""
    plain = type(weight) is torch.nn.Parameter and not weight.is_meta
    return plain and not weight.requires_grad and "blocks" not in name
