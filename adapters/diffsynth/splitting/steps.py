"""Every step of a training run, in the order in which they are applied."""

from wanshim.adapters.diffsynth import (
    checkpoint_offload,
    compiled_blocks,
    eight_bit_compute,
    encode_cache,
    kept_attention,
    kept_blocks,
    resume,
)
from wanshim.adapters.diffsynth.splitting import micro_batch, refusals
from wanshim.adapters.diffsynth.training_road import Step, from_module
from wanshim.core.strategy import Strategy
from wanshim.core.streaming import stream_of

STEPS = (
    Step(on=lambda run: run.plan.side_models, apply=from_module("splitting.side_models")),
    encode_cache.STEP,
    Step(on=lambda run: run.call.device.type == "cuda", apply=from_module("splitting.sample_waits")),
    Step(on=lambda run: run.handle is not None, apply=from_module("splitting.pipelined_loop", "over_stages")),
    Step(
        setting="plan",
        asked=lambda read: read.plan_name == "stream",
        refusal=refusals.stream_refusal,
        required=True,
        on=lambda run: run.plan.streamed_blocks or stream_of(run.call.dit),
        apply=from_module("splitting.streaming"),
    ),
    eight_bit_compute.STEP,
    compiled_blocks.STEP,
    Step(
        setting="chunk",
        asked=lambda read: isinstance(read.chunk, int),
        refusal=micro_batch.refusal,
        without="no chunks of tokens",
        on=lambda run: run.plan.step is not None and run.plan.step.chunk,
        apply=micro_batch.apply,
    ),
    checkpoint_offload.STEP,
    kept_attention.STEP,
    kept_blocks.STEP,
    Step(
        on=lambda run: run.plan.strategy is Strategy.PIPELINE,
        apply=from_module("splitting.pipelined_loop", "in_pipeline_of"),
    ),
    Step(  # what sums gradients comes after all that changes the blocks
        setting="plan",
        asked=lambda read: read.plan_name == "sequence",
        refusal=refusals.sequence_refusal,
        required=True,
        on=lambda run: run.plan.strategy is Strategy.SEQUENCE,
        apply=from_module("splitting.sequence"),
    ),
    resume.STEP,  # last: what it restores has its place by then
)
