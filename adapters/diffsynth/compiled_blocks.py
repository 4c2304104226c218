"""`diffsynth.compiled_blocks`: Wan's blocks run as one compiled graph while a LoRA trains.

While `launch_training_task` runs with WANSHIM_COMPILE=1, each block of the DiT is one graph of
`torch.compile`, the same graph for all blocks, with the rotary embedding in real fp32 arithmetic. Bits change: fused
kernels round less often than one operator after the other.

If `diffsynth.model_split` plans the run, its plan applies it (`splitting/apply.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.adapters.diffsynth.kept_attention import PLANNED
from wanshim.adapters.diffsynth.training_call import TrainingCall, launcher_seams
from wanshim.errors import FeatureUnavailable
from wanshim.patching import Feature, SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.compile import CompiledBlocks


def refusal(call: TrainingCall, read: settings.Settings) -> str | None:
    """Why the blocks of this training job cannot be compiled, by name, or None."""
    from diffsynth.models.wan_video_dit import WanModel

    from wanshim.core.compile import compiler_refusal

    pipe, state = call.pipe, call.accelerator.state
    if type(call.dit) is not WanModel:
        return f"{type(call.dit).__name__}: its blocks are not known to be one graph"
    for plugin, name in (("deepspeed_plugin", "DeepSpeed"), ("fsdp_plugin", "FSDP")):
        if getattr(state, plugin, None) is not None:
            return f"{name} attaches itself to parameters inside the blocks"
    planned = read.plan is not None and read.plan.name == "sequence"
    if planned or getattr(pipe, "use_unified_sequence_parallel", False):
        return "sequence parallel exchanges tokens inside the blocks"
    if getattr(pipe, "vap", None) is not None:
        return "vap computes a block's work from its children"
    if isinstance(read.chunk, int):
        return "WANSHIM_CHUNK cuts the blocks into chunks of tokens"
    if read.base is not None or getattr(call.dit, "quantize_config", None) is not None:
        return "quantised weights are unpacked inside the blocks"
    if getattr(call.dit, "vram_management_enabled", False):
        return "--fp8_models and --offload_models move the weights inside the blocks"
    return compiler_refusal(call.accelerator.device)


def compile_asked(call: TrainingCall, read: settings.Settings) -> bool:
    """Whether the blocks are to be compiled in this call of a training task, and can be."""
    return read.compile and refusal(call, read) is None


def refusal_of_compile(call: TrainingCall, read: settings.Settings) -> str | None:
    """Why blocks are not compiled although it was asked for, or None.

    Raises:
        FeatureUnavailable: they are not, under strict.
    """
    reason = refusal(call, read) if read.compile else None
    if reason is None:
        return None
    if read.strict:
        raise FeatureUnavailable(f"WANSHIM_COMPILE=1 is unavailable here: {reason}", hint="Unset WANSHIM_COMPILE")
    import logging  # needed by few: not at activation

    logging.getLogger("wanshim").warning("wanshim: diffsynth.compiled_blocks: blocks are not compiled: %s", reason)
    return reason


def compile_blocks(pipe: Any, undo: Undo, report: Callable[[str], None]) -> None:
    """Until `undo` ends, the blocks of this pipeline's DiT run compiled."""
    from diffsynth.models import wan_video_dit

    from wanshim.core.compile import CompiledBlocks, rotate_pairs

    def real_rotary(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def rope_apply(x: torch.Tensor, freqs: torch.Tensor, num_heads: int) -> torch.Tensor:
            turn = original if freqs.is_complex() else rotate_pairs  # complex outside of the graphs
            return turn(x, freqs, num_heads)

        return rope_apply

    undo.replace(wan_video_dit, "rope_apply", real_rotary)
    compiled = CompiledBlocks(pipe.dit.blocks, undo)
    if getattr(pipe, "vace", None) is not None:
        report("VACE's own blocks are not compiled: each takes one tensor more than the one before")
    undo.add(lambda: report(_what_was_done(compiled)))


def _what_was_done(compiled: CompiledBlocks) -> str:
    count = compiled.count
    if not count.graphs:
        return "nothing was compiled: no block ran"
    return (
        f"graphs compiled: {count.graphs}, in {count.seconds:.1f} s, {count.recompiled} of them again, "
        "for another shape, dtype or gradient mode"
    )


def _compile_while_training(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def launch(*args: object, **kwargs: object) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        call, read = TrainingCall.bind(signature, args, kwargs), settings.read()
        report = seam.notes.append
        if hasattr(call.model, PLANNED):
            report("diffsynth.model_split has planned this run, and its report says what is compiled")
            return original(*args, **kwargs)
        with Undo() as undo:
            if compile_asked(call, read):
                report("blocks are compiled: fused kernels round less often, so bits change")
                compile_blocks(call.pipe, undo, report)
            else:
                report(f"blocks are not compiled: {refusal_of_compile(call, read) or 'WANSHIM_COMPILE is off'}")
            return original(*args, **kwargs)

    return launch


FEATURE = Feature(
    name="diffsynth.compiled_blocks",
    summary="Wan's blocks are one compiled graph while a LoRA trains; bits change",
    switched_on_by="compile",
    relies_on=tuple(
        f"diffsynth.models.wan_video_dit:{name}" for name in ("DiTBlock.forward", "SelfAttention.forward", "rope_apply")
    ),
    seams=launcher_seams(
        _compile_while_training,
        why="blocks are compiled while it runs, and nothing afterwards",
        why_dmd2="a loop of its own with the same blocks",
        upstream="https://github.com/modelscope/DiffSynth-Studio: no issue is open",
        remove_when="DiffSynth's training compiles its blocks",
    ),
)
