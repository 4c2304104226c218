"""`diffsynth.checkpoint_offload`: what gradient checkpoints keep waits in page-locked host memory.

DiffSynth's option `--use_gradient_checkpointing_offload` sends it there through `torch.autograd.graph.save_on_cpu`,
with the host waiting for every copy. While `launch_training_task` runs, that name leads to
`wanshim.core.offload` instead; with WANSHIM_OFFLOAD=on every checkpoint goes there, without the option too.
A planned run offloads by itself if its step would not fit otherwise, or if that lets it keep attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.adapters.diffsynth.training_road import CHECKPOINT_OFFLOAD, Row, Run, Step, TrainingCall, step_feature
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.offload import CheckpointOffload

MIN_BYTES = 2**20  # smaller tensors stay on the GPU


def offload_asked(call: TrainingCall, read: settings.Settings) -> bool:
    """Whether wanshim is to offload in this call of a training task: by its own setting or DiffSynth's option."""
    return read.offload == "on" or (read.offload == "auto" and call.facts.offloading)


def offload_checkpoints(undo: Undo, row: Row, *, every: bool) -> None:
    """Until `undo` ends, `save_on_cpu` is wanshim's offload; with `every`, all checkpoints are inside one."""
    import torch.utils.checkpoint

    from wanshim.core.offload import CheckpointOffload

    offload = CheckpointOffload(min_bytes=MIN_BYTES)
    undo.add(offload.clear)
    undo.add(lambda: row.end(offload.count.sent, _what_was_done(offload, asked=every)))
    undo.replace(torch.autograd.graph, "save_on_cpu", lambda _: lambda *args, **kwargs: offload.saving())
    if every:
        undo.replace(torch.utils.checkpoint, "checkpoint", partial(_inside, offload))


def _inside(offload: CheckpointOffload, original: Callable[..., Any]) -> Callable[..., Any]:
    def checkpoint(*args: object, **kwargs: object) -> Any:
        with offload.saving():
            return original(*args, **kwargs)

    return checkpoint


def _what_was_done(offload: CheckpointOffload, *, asked: bool) -> str:
    from wanshim.core.model_split.plan import format_bytes

    count = offload.count
    if not count.sent and asked:
        return f"no checkpoint was offloaded: none kept a tensor of {format_bytes(MIN_BYTES)} or more"
    if not count.sent:
        return f"no checkpoint was offloaded: pass --{CHECKPOINT_OFFLOAD} or set WANSHIM_OFFLOAD=on, with checkpointing"
    return (
        f"{count.sent} checkpoint inputs, {count.sent_bytes / 2**30:.2f} GiB, went through "
        f"{offload.host_bytes / 2**30:.2f} GiB of host memory; {count.ahead} were back ahead of use, "
        f"{count.on_demand} when they were needed, {count.stayed} had not left"
    )


def refusal(call: TrainingCall) -> str | None:
    """Why checkpoints cannot be offloaded in this training job, or None."""
    if getattr(call.accelerator.state, "deepspeed_plugin", None) is not None:
        return "DeepSpeed checkpoints by itself, see cpu_checkpointing in its configuration"
    return None


def _apply(run: Run, row: Row) -> None:
    step = run.plan.step
    every = step is not None and step.offload
    off = "WANSHIM_OFFLOAD is off" if run.read.offload == "off" else refusal(run.call)
    if not every and (not row.own or off is not None):
        if row.own:
            row.without_effect(f"{STEP.without}: {off}")
        return
    if step is not None and every:
        asked = run.read.sources.get("offload", f"--{CHECKPOINT_OFFLOAD}")
        why = asked if step.offload_asked else run.plan.why_offloaded
        row.report(f"checkpoints are offloaded to host memory, bit for bit the same: {why}")
    offload_checkpoints(run.undo, row, every=every)


STEP = Step(
    feature="diffsynth.checkpoint_offload",
    setting="offload",
    asked=lambda read: read.offload == "on",
    refusal=lambda call, read: refusal(call),
    without="not offloaded by wanshim",
    apply=_apply,
)

FEATURE = step_feature(
    STEP,
    summary="gradient checkpoints kept in host memory at no cost in time, with or without DiffSynth's option",
    relies_on=("diffsynth.core.gradient.gradient_checkpoint:gradient_checkpoint_forward",),
    why="checkpoints are offloaded while it runs, and as before afterwards",
    upstream="https://github.com/modelscope/DiffSynth-Studio: no issue is open; measured at 2.15x of a step",
    remove_when="DiffSynth offloads checkpoints beside the GPU's work",
)
