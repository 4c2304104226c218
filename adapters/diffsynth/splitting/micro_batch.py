"""One micro-batch through a block of a DiT: its bytes, and the same computed in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from wanshim.adapters.diffsynth.attention_gradient import attending_by_torch
from wanshim.adapters.diffsynth.splitting.family import Family, class_of
from wanshim.adapters.diffsynth.splitting.refusals import dit_blocks, family_of
from wanshim.adapters.diffsynth.training_road import Row, Run, TrainingCall
from wanshim.core.strategy import MicroBatch, trace_block
from wanshim.core.strategy.chunking import chunk_module, chunk_rotary
from wanshim.settings import Settings
from wanshim.undo import Undo

# Bytes a token and channel of a block's widest product, on top of what the block needs as it is, if compiled blocks
# multiply in eight bits: the factor in eight bits, and what the kernel gives. Measured on one H200 with float8
# (benchmarks/results/training_step_eight_bit_1xH200.json): 3.0. The kernel of int8 gives four bytes, not two.
EIGHT_BIT_BYTES = {"float8": 3, "int8": 5}
# What a compiled block keeps for backward, of what it keeps as it is, as one graph and as four: norms leave bf16, not
# fp32, and what passes between graphs is kept besides. Measured on H200s (training_step_blocks_1xH200.json and
# sequence_training_480p_blocks_compiled_2xH200.json in benchmarks/results).
COMPILED_KEPT = {1: 0.83, 4: 0.91}


def micro_batch(
    pipe: Any, tokens: int, chunk: int | None, *, graphs: int = 0, compute: str | None = None
) -> MicroBatch:
    """One micro-batch of this many tokens through a block of this pipeline's DiT, in chunks or whole.

    Args:
        graphs: that a compiled block is; 0: the blocks are not compiled.
        compute: the eight-bit format in which they multiply; None: as they are.
    """
    family = known_family(pipe.dit)
    assert family is not None  # or nothing is predicted
    assert family.block_inputs is not None
    block = dit_blocks(pipe.dit)[0]
    args, kwargs = family.block_inputs(pipe, tokens)
    # other kernels know no shapes alone, and hold what a flash kernel holds
    with Undo() as trial, attending_by_torch(family.attention):
        if chunk is not None:
            chunk_block(block, chunk, trial, family.chunked)
            chunk_rope(chunk, trial)
        working = trace_block(block, args, kwargs)
    bytes_of = [leaf.nbytes for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    eight_bit = EIGHT_BIT_BYTES[compute] * tokens * _widest(block) if graphs and compute else 0
    kept = int(working.kept * COMPILED_KEPT[graphs]) if graphs else working.kept
    return MicroBatch(
        bytes_of[0], sum(bytes_of[1:]), kept, working.peak + eight_bit,
        attention=working.attention, attention_sums=working.attention_sums,
    )  # fmt: skip


def known_family(dit: object) -> Family | None:
    """The family of a DiT whose blocks are known to be called as its table says, or None."""
    family = family_of(dit)
    return family if family is not None and class_of(dit) in family.known_classes else None


def _widest(block: torch.nn.Module) -> int:
    return max(max(m.in_features, m.out_features) for m in block.modules() if isinstance(m, nn.Linear))


def chunk_block(block: torch.nn.Module, tokens: int, undo: Undo, paths: tuple[str, ...]) -> None:
    """Modules of a block that compute token by token, in chunks of tokens."""

    def chunked(module: torch.nn.Module) -> Callable[[Any], Any]:
        return lambda original: chunk_module(module, original, tokens)

    for path in paths:
        module = block.get_submodule(path)
        undo.replace(module, "forward", chunked(module))


def chunk_rope(tokens: int, undo: Undo) -> None:
    from diffsynth.models import wan_video_dit

    undo.replace(wan_video_dit, "rope_apply", lambda original: chunk_rotary(original, tokens))


def apply(run: Run, row: Row) -> None:
    """Run the blocks in the chunks of the plan until the run ends."""
    family = family_of(run.call.dit)
    assert family is not None  # or it had been refused
    assert run.plan.step is not None  # or it had no chunks
    assert run.plan.step.chunk is not None
    tokens = run.plan.step.chunk
    for block in dit_blocks(run.call.dit):
        chunk_block(block, tokens, run.undo, family.chunked)
    chunk_rope(tokens, run.undo)
    row.report(
        f"rotary embedding, norms and feed-forward network in chunks of {tokens} tokens: the first two bit for bit, "
        "the last equal up to the order of summation (WANSHIM_CHUNK)"
    )


def refusal(call: TrainingCall, read: Settings) -> str | None:
    """Why this job's blocks cannot run in chunks, or None."""
    return None if is_chunkable(call.dit) else f"the blocks of {type(call.dit).__name__} are not known in chunks"


def is_chunkable(dit: object) -> bool:
    """Whether the blocks are known to compute the same in chunks of tokens."""
    family = known_family(dit)
    return family is not None and bool(family.chunked)
