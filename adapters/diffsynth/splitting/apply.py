"""A training plan applied to DiffSynth: the one place that changes anything for the length of a training task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wanshim.adapters.diffsynth.checkpoint_offload import offload_checkpoints
from wanshim.adapters.diffsynth.kept_attention import keep_attention, refusal_of_request
from wanshim.adapters.diffsynth.kept_blocks import keep_blocks
from wanshim.adapters.diffsynth.splitting import sequence, side_models
from wanshim.adapters.diffsynth.splitting.block_changes import CHANGES
from wanshim.adapters.diffsynth.splitting.micro_batch import chunk_blocks
from wanshim.adapters.diffsynth.splitting.pipelined_loop import BYPASS, PipelinedLoop, keep_out_of_ddp, save_whole
from wanshim.adapters.diffsynth.splitting.refusals import blocks_of, family_of
from wanshim.adapters.diffsynth.training_call import CHECKPOINT_OFFLOAD, PLANNED, Report, TrainingCall
from wanshim.settings import Settings
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.model_split import SplitHandle
    from wanshim.core.strategy import TrainingPlan


def apply(
    plan: TrainingPlan, call: TrainingCall, handle: SplitHandle | None, read: Settings, undo: Undo, report: Report
) -> None:
    """Make the job run as planned until `undo` is removed.

    Args:
        handle: the split that it runs over, if it does.
        report: gets each statement for the user.
    """
    from wanshim.core.strategy import Strategy

    undo.set(call.model, {PLANNED: plan})
    for text in filter(None, (*plan.notes, plan.choice)):
        report(text)
    side_models.move(call.pipe, plan.side_models, plan.devices[0])
    if handle is not None:
        _over_stages(call, undo, report)
    if plan.strategy is Strategy.STREAM or plan.streamed_blocks:
        _stream(plan, call, read, undo, report)
    for change in CHANGES:
        if change.feature in plan.block_changes:
            report(plan.block_changes[change.feature])
            change.apply(call.pipe, getattr(read, change.setting), undo, report, plan)
        elif (reason := change.refused(call, read)) is not None:
            report(f"{change.without}: {reason}")
    if plan.step is not None and plan.step.chunk is not None:
        report(chunk_blocks(call.dit, plan.step.chunk, undo))
    if plan.step is not None and plan.step.offload:
        asked = read.sources.get("offload", f"--{CHECKPOINT_OFFLOAD}")
        why = asked if plan.step.offload_asked else "the step would not fit without"
        report(f"checkpoints are offloaded to host memory, bit for bit the same: {why}")
        offload_checkpoints(undo, report, every=True)
    if plan.step is not None and plan.step.keep is not None:
        report(plan.kept_attention)
        keep_attention(undo, report, plan.step.keep)
    elif (reason := refusal_of_request(call, read)) is not None:
        report(f"{'no block' if read.keep == 'blocks' else 'attention'} is not kept: {reason}")
    if plan.kept_blocks:
        keep_blocks(undo, report, plan, blocks_of(call.dit))
    if plan.outcome:
        report(plan.outcome)
    if plan.strategy is Strategy.PIPELINE and handle is not None:
        _pipeline(call, handle, undo)
    if plan.strategy is Strategy.SEQUENCE:
        undo.replace(call.accelerator, "save", save_whole)
        report(sequence.shard(plan, call, undo))


def _over_stages(call: TrainingCall, undo: Undo, report: Report) -> None:
    """A loop that saves whole files, and DDP where each of several processes trains a split of its own."""
    from wanshim.core.model_split.quantize import quantized_names

    undo.replace(call.accelerator, "save", save_whole)
    processes = call.accelerator.num_processes
    if processes > 1:
        undo.set_variable(BYPASS, "true")
        report(f"{BYPASS}=true: each of {processes} processes trains a split of its own")
        # DDP can neither flatten a quantised weight nor mix GPU and host. Such weights are frozen, and every process
        # has them from the same file.
        frozen = [*quantized_names(call.model, trained=False), *side_models.parameters_on_host(call.model)]
        keep_out_of_ddp(call.model, frozen, undo)


def _stream(plan: TrainingPlan, call: TrainingCall, read: Settings, undo: Undo, report: Report) -> None:
    """The frozen weights of some blocks wait in host memory, one copy for all processes of the host."""
    from wanshim.core.streaming import LocalRanks, stream_model

    family = family_of(call.dit)
    assert family is not None  # or it had been refused
    host = LocalRanks.of_process_group(call.accelerator.local_process_index, read.local_world_size)
    handle = stream_model(call.dit, plan.devices[0], count=plan.streamed_blocks, blocks=family.blocks[0], host=host)
    undo.replace(call.accelerator, "save", save_whole)
    # each process has the streamed weights from the one copy that all share: DDP has nothing to broadcast
    waiting = {id(weight.tensor) for block in handle.ring.blocks for weight in block.weights}
    tensors = (*call.model.named_parameters(), *call.model.named_buffers())
    keep_out_of_ddp(call.model, [name for name, tensor in tensors if id(tensor) in waiting], undo)
    report(str(handle.plan))
    report("set up in " + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in handle.seconds.items()))


def _pipeline(call: TrainingCall, handle: SplitHandle, undo: Undo) -> None:
    from wanshim.core.pipeline import Pipeline

    PipelinedLoop(Pipeline(handle), call.accelerator, call.model, call.logger).attach(undo)
