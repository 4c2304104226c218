"""`diffsynth.kept_attention`: gradient checkpointing computes self-attention once.

DiffSynth's checkpoints compute every block again in backward, attention too. While `launch_training_task` runs, each
checkpoint keeps self-attention's output and log-sum-exp, and its recomputation takes them: loss and gradients are the
same bit for bit. With WANSHIM_KEEP=attention both wait on the GPU if the predicted step leaves room there, else in host
memory. With WANSHIM_KEEP=blocks the last blocks are not computed again at all, as many as the GPU has room for beside
the attention of the others.

If `diffsynth.model_split` plans the run, its plan says whether and where attention is kept (`splitting/apply.py`); by
default it keeps attention wherever there is room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.adapters.diffsynth import kept_blocks
from wanshim.adapters.diffsynth.training_call import BY_PLAN, Report, TrainingCall, launcher_seams
from wanshim.errors import FeatureUnavailable
from wanshim.patching import Feature, SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.recompute import KeptAttention
    from wanshim.core.strategy import KeptOn, TrainingPlan

MIN_BYTES = 2**20  # smaller outputs stay on the GPU


def keep_asked(call: TrainingCall, read: settings.Settings) -> bool | None:
    """Whether attention is to be kept in this call of a training task; None: where there is room."""
    if read.keep == "off" or refusal(call) is not None:
        return False
    return True if read.keep == "attention" else None


def refusal_of_request(call: TrainingCall, read: settings.Settings) -> str | None:
    """Why nothing is kept although it was asked for, or None.

    Raises:
        FeatureUnavailable: it is not, under strict.
    """
    refusals = {"attention": refusal, "blocks": kept_blocks.refusal}
    reason = refusals[read.keep](call) if read.keep in refusals else None
    if reason is not None and read.strict:
        raise FeatureUnavailable(f"WANSHIM_KEEP={read.keep} is unavailable here: {reason}")
    return reason


def refusal(call: TrainingCall) -> str | None:
    """Why attention cannot be kept in this training job, or None."""
    return kept_blocks.refusal(call) or _refusal_of_kernel()


def _refusal_of_kernel() -> str | None:
    """Why the attention kernel of Wan's blocks cannot be kept, or None. DiffSynth takes the first one installed."""
    import torch
    from diffsynth.models import wan_video_dit

    if wan_video_dit.FLASH_ATTN_3_AVAILABLE:
        if not any(hasattr(torch.ops.flash_attn_3, name) for name in ("fwd", "_flash_attn_forward")):
            return "this FlashAttention 3 calls its kernel past torch's operators: install a newer one"
    elif wan_video_dit.FLASH_ATTN_2_AVAILABLE:
        if not hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
            return "this flash-attn calls its kernel past torch's operators: install 2.7 or newer"
    elif wan_video_dit.SAGE_ATTN_AVAILABLE:
        return "SageAttention has no backward: no gradient passes through it, kept or not"
    return None


def keep_attention(undo: Undo, report: Report, place: KeptOn, without_effect: Report | None = None) -> None:
    """Until `undo` ends, every checkpoint keeps self-attention's results there.

    Args:
        without_effect: gets the statement that none did, in place of `report`.
    """
    import torch.utils.checkpoint

    from wanshim.core.offload import CheckpointOffload
    from wanshim.core.recompute import KeptAttention
    from wanshim.core.strategy import KeptOn

    offload = CheckpointOffload(min_bytes=MIN_BYTES) if place is KeptOn.HOST else None
    kept = KeptAttention(offload)
    undo.add(kept.remove)
    if offload is not None:
        undo.add(offload.clear)
    undo.add(lambda: (report if kept.count.kept else without_effect or report)(_what_was_done(kept)))
    undo.replace(torch.utils.checkpoint, "checkpoint", _keeping(kept))


def _keeping(kept: KeptAttention) -> Callable[[Any], Any]:
    def keeping(original: Callable[..., Any]) -> Any:
        def checkpoint(*args: object, **kwargs: object) -> Any:
            if kwargs.get("use_reentrant") is False and "context_fn" not in kwargs:
                kwargs["context_fn"] = kept.contexts
            return original(*args, **kwargs)

        return checkpoint

    return keeping


def _what_was_done(kept: KeptAttention) -> str:
    from wanshim.core.model_split.plan import format_bytes

    count = kept.count
    if not count.kept:
        return "no attention was kept: no checkpointed block ran self-attention by a kernel that is known to torch"
    where = "" if kept.offload is None else f", through {format_bytes(kept.offload.host_bytes)} of host memory"
    return f"{count.kept} attentions kept, {format_bytes(count.kept_bytes)}{where}; {count.reused} were used again"


def _keep_where_planned(call: TrainingCall, undo: Undo, seam: SeamState) -> None:
    """Keep attention until `undo` ends, unless `diffsynth.model_split` plans the run."""
    read, report = settings.read(), seam.notes.append
    if call.plan is not None and (call.plan.kept_attention or call.plan.kept_blocks):
        report(BY_PLAN)
    elif (reason := refusal_of_request(call, read)) is not None or (
        keep_asked(call, read) is False and read.keep != "blocks"
    ):
        seam.fall_back(f"attention is not kept: {reason or refusal(call) or 'WANSHIM_KEEP is off'}")
    elif call.plan is not None:
        seam.fall_back("attention is not kept: the plan of this run has no room")
    else:
        plan = _plan(call, read)
        for text in filter(None, (*plan.notes, plan.kept_attention)):
            report(text)
        if not plan.kept_attention and not plan.kept_blocks:
            seam.fall_back("attention is not kept: there is no room")
        if plan.step is not None and plan.step.keep is not None:
            keep_attention(undo, report, plan.step.keep, None if plan.kept_blocks else seam.fall_back)
        if plan.kept_blocks:
            from wanshim.adapters.diffsynth.splitting.refusals import blocks_of

            kept_blocks.keep_blocks(undo, report, plan, blocks_of(call.dit))


def _plan(call: TrainingCall, read: settings.Settings) -> TrainingPlan:
    """The run as DiffSynth makes it, on one device a process, with attention kept where that fits."""
    from wanshim.adapters.diffsynth.splitting.job import measure_limits, read_job
    from wanshim.adapters.diffsynth.splitting.refusals import family_of
    from wanshim.core.strategy import KeptOn, Request, StepSettings, Strategy, TrainingPlan, decide

    device = (str(call.device),)
    if call.dit is None or family_of(call.dit) is None:
        keep = KeptOn.DEVICE if keep_asked(call, read) else None
        step = StepSettings(chunk=None, offload=False, in_flight=1, keep=keep)
        note = "peak not predicted, and no block kept: this model is not known"
        return TrainingPlan(strategy=Strategy.RESIDENT, devices=device, step=step, notes=(note,))
    job = read_job(call, None, read)
    asked = job.request
    request = Request(
        strategy=Strategy.RESIDENT, offload=bool(asked.offload), keep=asked.keep, keep_blocks=asked.keep_blocks
    )
    job = replace(job, request=request)
    return decide(job, measure_limits(job, read))


FEATURE = Feature(
    name="diffsynth.kept_attention",
    summary="gradient checkpointing computes self-attention once, bit for bit the same",
    switched_on_by="keep",
    relies_on=("diffsynth.core.gradient.gradient_checkpoint:gradient_checkpoint_forward",),
    seams=launcher_seams(
        "diffsynth.kept_attention",
        _keep_where_planned,
        why="checkpoints keep attention while it runs, and nothing afterwards",
        upstream="https://github.com/modelscope/DiffSynth-Studio: no issue is open; a tenth of a 14B LoRA step",
        remove_when="DiffSynth's gradient checkpointing keeps attention",
    ),
)
