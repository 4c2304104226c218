"""Frozen weights of some blocks wait in host memory while DiffSynth trains, one copy for all processes of the host."""

from __future__ import annotations

import torch

from wanshim.adapters.diffsynth.splitting import refusals
from wanshim.adapters.diffsynth.splitting.pipelined_loop import keep_out_of_ddp, save_whole
from wanshim.adapters.diffsynth.training_road import Row, Run
from wanshim.core.strategy import TrainingPlan
from wanshim.core.streaming import StreamHandle, stream_model, stream_of


def apply(run: Run, row: Row) -> None:
    """Have the blocks of the plan wait in host memory, and no others; they still do when the run has ended."""
    call, plan, undo = run.call, run.plan, run.undo
    handle = _standing(call.dit, plan)
    if not plan.streamed_blocks:
        return
    family = refusals.family_of(call.dit)
    assert family is not None  # or it had been refused
    handle = handle or stream_model(
        call.dit, plan.devices[0], count=plan.streamed_blocks, blocks=family.blocks[0], host=refusals.ranks_here()
    )
    undo.replace(call.accelerator, "save", save_whole)
    # each process has the streamed weights from the one copy that all share: DDP has nothing to broadcast
    waiting = {id(weight.tensor) for block in handle.ring.blocks for weight in block.weights}
    tensors = (*call.model.named_parameters(), *call.model.named_buffers())
    keep_out_of_ddp(call.model, [name for name, tensor in tensors if id(tensor) in waiting], undo)
    row.report(str(handle.plan))
    row.report("set up in " + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in handle.seconds.items()))


def _standing(dit: torch.nn.Module, plan: TrainingPlan) -> StreamHandle | None:
    """The streaming of a run before this one, if it is that of the plan; another is taken back."""
    handle = stream_of(dit)
    if handle is None:
        return None
    waiting = (weight.tensor for block in handle.ring.blocks for weight in block.weights)
    if len(handle.plan.streamed) == plan.streamed_blocks and not any(tensor.requires_grad for tensor in waiting):
        return handle
    handle.remove()
    return None
