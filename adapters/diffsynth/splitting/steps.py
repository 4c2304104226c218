"""Every step of a training run, in the order in which they are applied."""

from wanshim.adapters.diffsynth import (
    checkpoint_offload,
    compiled_blocks,
    eight_bit_compute,
    kept_attention,
    kept_blocks,
    resume,
)
from wanshim.adapters.diffsynth.splitting import micro_batch, pipelined_loop, sequence, side_models, streaming

STEPS = (
    side_models.STEP,
    pipelined_loop.OVER_STAGES,
    streaming.STEP,
    eight_bit_compute.STEP,
    compiled_blocks.STEP,
    micro_batch.STEP,
    checkpoint_offload.STEP,
    kept_attention.STEP,
    kept_blocks.STEP,
    pipelined_loop.STEP,
    sequence.STEP,  # what sums gradients comes after all that changes the blocks
    resume.STEP,  # last: what it restores has its place by then
)
