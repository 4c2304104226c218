"""Blocks that DiffSynth's gradient checkpointing does not compute again: by default in a planned run on GPUs that have
room, with WANSHIM_KEEP=blocks in others too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.training_road import CHECKPOINTING, Row, Run, Step, TrainingCall
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.recompute import KeptBlocks
    from wanshim.core.strategy import TrainingPlan


def refusal(call: TrainingCall) -> str | None:
    """Why no block can be kept in this training job, or None."""
    if getattr(call.accelerator.state, "deepspeed_plugin", None) is not None:
        return "DeepSpeed checkpoints by itself"
    if not call.facts.checkpointing:
        return f"nothing is computed again in backward: pass --{CHECKPOINTING}"
    return None


def keep_blocks(undo: Undo, row: Row, plan: TrainingPlan, blocks: list[torch.nn.Module]) -> None:
    """Until `undo` ends, the last of `blocks` on each stage run without a checkpoint, as many as the plan says."""
    import torch.utils.checkpoint

    from wanshim.core.recompute import KeptBlocks

    kept = KeptBlocks(_last_of_each_stage(plan, blocks))
    row.report(plan.kept_blocks_text)
    undo.add(lambda: row.end(kept.calls, _what_was_done(kept)))
    undo.replace(torch.utils.checkpoint, "checkpoint", kept.around)


def _last_of_each_stage(plan: TrainingPlan, blocks: list[Any]) -> list[Any]:
    assert plan.step is not None  # or it had no blocks to keep
    ends = (*plan.split_points, len(blocks))
    return [
        block for end, count in zip(ends, plan.step.num_kept_blocks, strict=True) for block in blocks[end - count : end]
    ]


def _what_was_done(kept: KeptBlocks) -> str:
    if not kept.calls:
        return "no block was kept: none of them ran inside a checkpoint of torch's"
    return f"{len(kept.blocks)} blocks ran {kept.calls} times without being computed again"


def _apply(run: Run, row: Row) -> None:
    if run.plan.kept_blocks_text:
        from wanshim.adapters.diffsynth.splitting.refusals import dit_blocks

        keep_blocks(run.undo, row, run.plan, dit_blocks(run.call.dit))


STEP = Step(
    feature="diffsynth.kept_attention",
    setting="keep",
    asked=lambda read: read.keep == "blocks",
    refusal=lambda call, read: refusal(call),
    without="no block is kept",
    apply=_apply,
)
