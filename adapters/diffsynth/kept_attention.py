"""`diffsynth.kept_attention`: gradient checkpointing computes self-attention once.

DiffSynth's checkpoints compute every block again in backward, attention too. While `launch_training_task` runs, each
checkpoint keeps self-attention's output and log-sum-exp, and its recomputation takes them: loss and gradients are the
same bit for bit. With WANSHIM_KEEP=attention both wait on the GPU if the predicted step leaves room there, else in host
memory. With WANSHIM_KEEP=blocks the last blocks are not computed again at all, as many as the GPU has room for beside
the attention of the others.

A run that `diffsynth.model_split` plans keeps both by default wherever there is room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth import attention_gradient, kept_blocks
from wanshim.adapters.diffsynth.training_road import Row, Run, TrainingCall, step_feature
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.recompute import KeptAttention
    from wanshim.core.strategy import KeptOn

MIN_BYTES = 2**20  # smaller outputs stay on the GPU


def refusal(call: TrainingCall) -> str | None:
    """Why attention cannot be kept in this training job, or None."""
    return kept_blocks.refusal(call) or _refusal_of_kernel(call)


def _refusal_of_kernel(call: TrainingCall) -> str | None:
    """Why the attention kernel of the blocks cannot be kept, or None. DiffSynth takes the first one installed."""
    import torch

    from wanshim.adapters.diffsynth.splitting.refusals import family_of

    family = family_of(call.dit)
    if family is None or attention_gradient.torch_computes(family.attention, call.pipe.torch_dtype, call.device):
        return None
    kernel = attention_gradient.kernel_of(family.attention)
    if kernel == "flash_attention_3":
        if not any(hasattr(torch.ops.flash_attn_3, name) for name in ("fwd", "_flash_attn_forward")):
            return "this FlashAttention 3 calls its kernel past torch's operators: install a newer one"
    elif kernel == "flash_attention_2":
        if not hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
            return "this flash-attn calls its kernel past torch's operators: install 2.7 or newer"
    elif kernel == "sage_attention":
        return "SageAttention has no backward: no gradient passes through it, kept or not"
    elif kernel not in ("torch", "xformers"):
        return f"{kernel} is no kernel whose operators are known"
    return None


def keep_attention(undo: Undo, row: Row, place: KeptOn, *, has_effect: bool = False) -> None:
    """Until `undo` ends, every checkpoint keeps self-attention's results there.

    Args:
        has_effect: the feature has an effect, whether attention is kept or not.
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
    undo.add(lambda: row.end(kept.count.kept or has_effect, _what_was_done(kept)))
    undo.replace(torch.utils.checkpoint, "checkpoint", partial(_keeping, kept))


def _keeping(kept: KeptAttention, original: Callable[..., Any]) -> Callable[..., Any]:
    def checkpoint(*args: object, **kwargs: object) -> Any:
        if kwargs.get("use_reentrant") is False and "context_fn" not in kwargs:
            kwargs["context_fn"] = kept.contexts
        return original(*args, **kwargs)

    return checkpoint


def _what_was_done(kept: KeptAttention) -> str:
    from wanshim.core.model_split.plan import format_bytes

    count = kept.count
    if not count.kept:
        return "no attention was kept: no checkpointed block ran self-attention by a kernel that is known to torch"
    where = "" if kept.offload is None else f", through {format_bytes(kept.offload.host_bytes)} of host memory"
    return f"{count.kept} attentions kept, {format_bytes(count.kept_bytes)}{where}; {count.reused} were used again"


def _apply(run: Run, row: Row) -> None:
    step = run.plan.step
    if step is not None and step.keep is not None:
        row.report(run.plan.kept_attention)
        keep_attention(run.undo, row, step.keep, has_effect=bool(run.plan.kept_blocks_text))
    elif row.own and not run.plan.kept_blocks_text:
        off = "WANSHIM_KEEP is off" if run.read.keep == "off" else "there is no room"
        row.without_effect(f"attention is not kept: {refusal(run.call) or off}")


STEP = replace(
    kept_blocks.STEP,
    asked=lambda read: read.keep == "attention",
    refusal=lambda call, read: refusal(call),
    without="attention is not kept",
    apply=_apply,
)

FEATURE = step_feature(
    STEP,
    summary="gradient checkpointing computes self-attention once, bit for bit the same",
    relies_on=("diffsynth.core.gradient.gradient_checkpoint:gradient_checkpoint_forward",),
    why="checkpoints keep attention while it runs, and nothing afterwards",
    upstream="https://github.com/modelscope/DiffSynth-Studio: no issue is open; a tenth of a 14B LoRA step",
    remove_when="DiffSynth's gradient checkpointing keeps attention",
)
