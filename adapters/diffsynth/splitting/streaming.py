"""Frozen weights of some blocks wait in host memory while DiffSynth trains, one copy for all processes of the host."""

from __future__ import annotations

from wanshim.adapters.diffsynth.splitting import refusals
from wanshim.adapters.diffsynth.splitting.pipelined_loop import keep_out_of_ddp, save_whole
from wanshim.adapters.diffsynth.training_road import Row, Run
from wanshim.core.streaming import stream_model


def apply(run: Run, row: Row) -> None:
    """Have the blocks of the plan wait in host memory until the run ends."""
    call, plan, undo = run.call, run.plan, run.undo
    family = refusals.family_of(call.dit)
    assert family is not None  # or it had been refused
    here = refusals.ranks_here()
    handle = stream_model(call.dit, plan.devices[0], count=plan.streamed_blocks, blocks=family.blocks[0], host=here)
    undo.replace(call.accelerator, "save", save_whole)
    # each process has the streamed weights from the one copy that all share: DDP has nothing to broadcast
    waiting = {id(weight.tensor) for block in handle.ring.blocks for weight in block.weights}
    tensors = (*call.model.named_parameters(), *call.model.named_buffers())
    keep_out_of_ddp(call.model, [name for name, tensor in tensors if id(tensor) in waiting], undo)
    row.report(str(handle.plan))
    row.report("set up in " + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in handle.seconds.items()))
