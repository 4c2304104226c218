"""Frozen weights of some blocks wait in host memory while DiffSynth trains, one copy for all processes of the host."""

from __future__ import annotations

from wanshim.adapters.diffsynth.splitting import refusals
from wanshim.adapters.diffsynth.splitting.pipelined_loop import keep_out_of_ddp, save_whole
from wanshim.adapters.diffsynth.training_road import Row, Run, TrainingCall, plan_step
from wanshim.core.strategy import Strategy
from wanshim.core.streaming import LocalRanks, stream_model
from wanshim.settings import Settings


def refusal(call: TrainingCall, read: Settings) -> str | None:
    """The name of what cannot be streamed in this training job, or None."""
    pipe, family = call.pipe, refusals.family_of(call.dit)
    reason = refusals.conflict(call, read) or refusals.refusal(pipe)
    if reason is not None or family is None:
        return reason
    if len(family.blocks) > 1:
        return f"{family.name} runs {' and '.join(family.blocks)} one after the other, and one list is streamed"
    if (owner := family.in_place_of_blocks(pipe)) is not None:
        return f"{owner} computes a block's work from its children, past the hook that brings the block's weights"
    if read.base is not None:
        return "WANSHIM_BASE: a quantised weight is more than the bytes that are streamed"
    if getattr(pipe.dit, "vram_management_enabled", False):
        return "--fp8_models and --offload_models move the weights themselves"
    if getattr(pipe.dit, "quantize_config", None) is not None:
        return "--quant_options: a quantised weight is more than the bytes that are streamed"
    if not call.facts.checkpointing:
        return "backward needs each block's weights again: pass --use_gradient_checkpointing"
    return None


def _apply(run: Run, row: Row) -> None:
    call, plan, undo = run.call, run.plan, run.undo
    if plan.strategy is not Strategy.STREAM and not plan.streamed_blocks:
        return
    family = refusals.family_of(call.dit)
    assert family is not None  # or it had been refused
    here = refusals.ranks_here()
    host = LocalRanks.of_process_group(here.index, here.count)
    handle = stream_model(call.dit, plan.devices[0], count=plan.streamed_blocks, blocks=family.blocks[0], host=host)
    undo.replace(call.accelerator, "save", save_whole)
    # each process has the streamed weights from the one copy that all share: DDP has nothing to broadcast
    waiting = {id(weight.tensor) for block in handle.ring.blocks for weight in block.weights}
    tensors = (*call.model.named_parameters(), *call.model.named_buffers())
    keep_out_of_ddp(call.model, [name for name, tensor in tensors if id(tensor) in waiting], undo)
    row.report(str(handle.plan))
    row.report("set up in " + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in handle.seconds.items()))


STEP = plan_step("stream", refusal, _apply)
