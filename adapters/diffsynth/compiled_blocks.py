"""`diffsynth.compiled_blocks`: blocks of a Wan or MiniMax-H3 DiT run as one compiled graph while a LoRA trains.

While `launch_training_task` runs with WANSHIM_COMPILE=1, each block of the DiT is one graph of
`torch.compile`, the same graph for all blocks, with Wan's rotary embedding in real fp32 arithmetic. Bits change: fused
kernels round less often than one operator after the other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.adapters.diffsynth.eight_bit_compute import attached_refusal
from wanshim.adapters.diffsynth.training_road import FAMILIES, Row, Run, Step, TrainingCall, step_feature
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.core.compile import CompiledBlocks
    from wanshim.core.strategy import Request, TrainingPlan


def refusal(call: TrainingCall, read: settings.Settings) -> str | None:
    """Why the blocks of this training job cannot be compiled, by name, or None."""
    from wanshim.adapters.diffsynth.splitting.micro_batch import known_family
    from wanshim.adapters.diffsynth.splitting.refusals import refused_part
    from wanshim.core.compile import compiler_refusal
    from wanshim.core.shared.plain import is_compiled

    pipe = call.pipe
    if known_family(call.dit) is None:
        return f"{type(call.dit).__name__}: its blocks are not known to be one graph"
    if is_compiled(call.dit):
        return "the program compiles them itself"
    if (reason := refused_part(pipe)) is not None:
        return reason
    if (reason := attached_refusal(call)) is not None:
        return reason
    if getattr(pipe, "use_unified_sequence_parallel", False):
        return "use_usp: DiffSynth exchanges tokens inside the blocks"
    if getattr(pipe, "vap", None) is not None:
        return "vap computes a block's work from its children"
    if isinstance(read.chunk, int):
        return "WANSHIM_CHUNK cuts the blocks into chunks of tokens"
    if read.base not in (None, read.compute) or getattr(call.dit, "quantize_config", None) is not None:
        return "quantised weights are unpacked inside the blocks, unless WANSHIM_COMPUTE multiplies them as they are"
    return compiler_refusal(call.device)


def graphs_of_a_block(request: Request, processes: int) -> int:
    """The number of graphs as which a block is compiled, or may be while no strategy is chosen; 0: it is not."""
    from wanshim.core.strategy import Strategy

    if STEP.feature not in request.block_changes:
        return 0
    exchanges = request.strategy is Strategy.SEQUENCE or (request.strategy is None and processes > 1)
    return 4 if exchanges else 1


def compile_blocks(pipe: Any, undo: Undo, row: Row, plan: TrainingPlan | None = None, *, strict: bool = False) -> None:
    """Until `undo` ends, the blocks of this pipeline's DiT run compiled; what does not compile is computed without the
    compiler, or raises if `strict`."""
    from wanshim.adapters.diffsynth.splitting.micro_batch import known_family
    from wanshim.adapters.diffsynth.splitting.refusals import dit_blocks
    from wanshim.core.compile import CompiledBlocks
    from wanshim.core.strategy import Strategy

    family = known_family(pipe.dit)
    assert family is not None  # or it had been refused
    for target, make in family.in_graphs.items():
        module, _, name = target.partition(":")
        undo.replace(import_module(module), name, make)
    exchanged = plan is not None and plan.strategy is Strategy.SEQUENCE
    compiled = CompiledBlocks(
        dit_blocks(pipe.dit),
        undo,
        outside=family.exchanged if exchanged else None,
        by_value=family.by_value,
        on_fallback=None if strict else STEP.warn,
    )
    if exchanged:
        row.report("self-attention, whose tokens are exchanged between ranks, runs between four graphs of a block")
    if getattr(pipe, "vace", None) is not None:
        row.report("VACE's own blocks are not compiled: each takes one tensor more than the one before")
    undo.add(lambda: row.end(compiled.count.graphs > compiled.count.eager.total(), _what_was_done(compiled)))


def _what_was_done(compiled: CompiledBlocks) -> str:
    count, eager = compiled.count, compiled.count.eager.total()
    left = "".join(f"; left to eager {times} times: {cause}" for cause, times in count.eager.items())
    if count.graphs <= eager:
        return f"nothing was compiled{left}" if eager else "nothing was compiled: no block ran"
    return (
        f"graphs compiled: {count.graphs - eager}, in {count.seconds:.1f} s, {count.recompiled} of them again, "
        f"for another shape, dtype or gradient mode{left}"
    )


def _apply(run: Run, row: Row) -> None:
    compile_blocks(run.call.pipe, run.undo, row, run.plan, strict=run.read.insists_on("compile"))


STEP = Step(
    feature="diffsynth.compiled_blocks",
    setting="compile",
    asked=lambda read: read.compile,
    refusal=refusal,
    without="blocks are not compiled",
    changes_blocks="blocks are compiled: fused kernels round less often, so bits change",
    apply=_apply,
)

FEATURE = step_feature(
    STEP,
    summary="blocks of a Wan or MiniMax-H3 DiT are one compiled graph while a LoRA trains; bits change",
    relies_on=tuple(
        f"diffsynth.models.{name}"
        for name in (
            "wan_video_dit:DiTBlock.forward",
            "wan_video_dit:SelfAttention.forward",
            "wan_video_dit:rope_apply",
            "minimax_h3_dit:MiniMaxH3DiTBlock.forward",
            "minimax_h3_dit:MiniMaxH3Attention.forward",
            "minimax_h3_dit:_sdpa_varlen_attention",
        )
    ),
    families=FAMILIES,
    why="blocks are compiled while it runs, and nothing afterwards",
    upstream="https://github.com/modelscope/DiffSynth-Studio: no issue is open",
    remove_when="DiffSynth's training compiles its blocks",
)
