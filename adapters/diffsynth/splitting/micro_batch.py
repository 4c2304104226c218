"""One micro-batch through a block of a Wan DiT: its bytes, and the same computed in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wanshim.adapters.diffsynth.training_road import Row, Run, TrainingCall
from wanshim.core.strategy import MicroBatch, trace_block
from wanshim.core.strategy.chunking import chunk_module, chunk_rotary
from wanshim.settings import Settings
from wanshim.undo import Undo

KNOWN_DITS = ("WanModel",)  # whose blocks are called with activation, context, modulation and frequencies
TEXT_TOKENS, IMAGE_TOKENS = 512, 257  # what WanModel's prompt and CLIP image take of the context
NORMS = ("self_attn.norm_q", "self_attn.norm_k", "cross_attn.norm_q", "cross_attn.norm_k")
FLASH_FLAGS = ("FLASH_ATTN_3_AVAILABLE", "FLASH_ATTN_2_AVAILABLE", "SAGE_ATTN_AVAILABLE")
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
    from diffsynth.models import wan_video_dit

    dit = pipe.dit
    block = dit.blocks[0]
    shape = {"device": "meta", "dtype": pipe.torch_dtype}
    context = TEXT_TOKENS + (IMAGE_TOKENS if getattr(dit, "has_image_input", False) else 0)
    each = (tokens,) if getattr(dit, "seperated_timestep", False) else ()  # a time step for every token
    x = torch.empty((1, tokens, dit.dim), **shape)
    frequencies = torch.empty((tokens, 1, dit.dim // block.num_heads // 2), dtype=torch.complex128, device="meta")
    shared = (
        torch.empty((1, context, dit.dim), **shape),
        torch.empty((1, *each, 6, dit.dim), **shape),
        frequencies,
    )
    with Undo() as trial:
        for flag in FLASH_FLAGS:  # other kernels know no shapes alone, and hold what a flash kernel holds
            trial.replace(wan_video_dit, flag, lambda _: False)
        if chunk is not None:
            chunk_block(block, chunk, trial)
            chunk_rope(chunk, trial)
        working = trace_block(block, (x, *shared))
    bytes_of = [t.numel() * t.element_size() for t in (x, *shared)]
    eight_bit = EIGHT_BIT_BYTES[compute] * tokens * _widest(block) if graphs and compute else 0
    kept = int(working.kept * COMPILED_KEPT[graphs]) if graphs else working.kept
    return MicroBatch(
        bytes_of[0], sum(bytes_of[1:]), kept, working.peak + eight_bit,
        attention=bytes_of[0], attention_sums=4 * tokens * block.num_heads,
    )  # fmt: skip


def _widest(block: torch.nn.Module) -> int:
    return max(max(m.in_features, m.out_features) for m in block.modules() if isinstance(m, nn.Linear))


def chunk_block(block: torch.nn.Module, tokens: int, undo: Undo, paths: tuple[str, ...] = (*NORMS, "ffn")) -> None:
    """The feed-forward network and the norms of queries and keys, in chunks of tokens."""

    def chunked(module: torch.nn.Module) -> Callable[[Any], Any]:
        return lambda original: chunk_module(module, original, tokens)

    for path in paths:
        module = block.get_submodule(path)
        undo.replace(module, "forward", chunked(module))


def chunk_rope(tokens: int, undo: Undo) -> None:
    from diffsynth.models import wan_video_dit

    undo.replace(wan_video_dit, "rope_apply", lambda original: chunk_rotary(original, tokens))


def chunk_blocks(dit: Any, tokens: int, undo: Undo) -> str:
    """All blocks in chunks, until `undo` is removed; the statement for the user."""
    for block in dit.blocks:
        chunk_block(block, tokens, undo)
    chunk_rope(tokens, undo)
    return (
        f"rotary embedding, norms and feed-forward network in chunks of {tokens} tokens: the first two bit for bit, "
        "the last equal up to the order of summation (WANSHIM_CHUNK)"
    )


def apply(run: Run, row: Row) -> None:
    """Run the blocks in the chunks of the plan until the run ends."""
    assert run.plan.step is not None  # or it had no chunks
    assert run.plan.step.chunk is not None
    row.report(chunk_blocks(run.call.dit, run.plan.step.chunk, run.undo))


def refusal(call: TrainingCall, read: Settings) -> str | None:
    """Why this job's blocks cannot run in chunks, or None."""
    name = type(call.dit).__name__
    return None if name in KNOWN_DITS else f"{name} is not a model whose blocks are known"
