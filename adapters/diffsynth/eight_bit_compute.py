"""`diffsynth.eight_bit_compute`: a frozen base multiplies in eight bits while a LoRA trains.

While `launch_training_task` runs with WANSHIM_COMPUTE=float8 or int8, the frozen Linears of the DiT's blocks multiply
in eight bits, forward and for the gradient of their input, with a scale for each token and each output channel. LoRA,
norms, attention, embeddings and head stay as they are. Bits change. A base that WANSHIM_BASE stores in the same format
is multiplied as it is stored.
"""

from __future__ import annotations

from typing import Any

from wanshim import settings
from wanshim.adapters.diffsynth.training_road import Report, Row, Run, Step, TrainingCall, step_feature
from wanshim.undo import Undo


def refusal(call: TrainingCall, read: settings.Settings) -> str | None:
    """Why the blocks of this training job cannot multiply in eight bits, by name, or None."""
    from wanshim.adapters.diffsynth.splitting.refusals import family_of
    from wanshim.core.eight_bit import refusal as of_device
    from wanshim.core.eight_bit import takes_eight_bits

    assert read.compute is not None
    if family_of(call.dit) is None:
        return f"{type(call.dit).__name__}: its blocks are not known"
    if (reason := attached_refusal(call)) is not None:
        return reason
    if getattr(call.dit, "quantize_config", None) is not None:
        return "--quant_options: those weights multiply in their own Linears; store the base with WANSHIM_BASE instead"
    if read.base not in (None, read.compute):
        return f"WANSHIM_BASE={read.base}: choose the same format to store and to multiply in"
    if not takes_eight_bits(_blocks(call.pipe), read.compute):
        return f"no frozen Linear of the blocks can multiply in {read.compute}: train a LoRA over a frozen base"
    reason = of_device(read.compute, call.device)
    other = "; WANSHIM_COMPUTE=int8 may be available" if reason is not None and read.compute == "float8" else ""
    return f"{reason}{other}" if reason is not None else None


def _blocks(pipe: Any) -> list[Any]:
    """The blocks of this pipeline's models that train."""
    from wanshim.adapters.diffsynth.splitting.refusals import dit_blocks

    vace = getattr(pipe, "vace", None)
    return [*dit_blocks(pipe.dit), *(vace.vace_blocks if vace is not None else ())]


def compute_blocks(pipe: Any, name: str, undo: Undo, report: Report) -> None:
    """Until `undo` ends, the blocks of this pipeline's DiT multiply in this format."""
    from wanshim.core.eight_bit import compute_in_eight_bits

    count = compute_in_eight_bits(_blocks(pipe), name, undo)
    report(f"{count.changed} Linears multiply in {name}; {count.left} stay as they are, LoRA's among them")


def attached_refusal(call: TrainingCall) -> str | None:
    """The reason: what attaches itself to the parameters of this job's blocks, or None."""
    state = call.accelerator.state
    for plugin, name in (("deepspeed_plugin", "DeepSpeed"), ("fsdp_plugin", "FSDP")):
        if getattr(state, plugin, None) is not None:
            return f"{name} attaches itself to parameters inside the blocks"
    if getattr(call.dit, "vram_management_enabled", False):
        return "--fp8_models and --offload_models move the weights inside the blocks"
    return None


def _apply(run: Run, row: Row) -> None:
    assert run.read.compute is not None  # or the plan had not said so
    compute_blocks(run.call.pipe, run.read.compute, run.undo, row.report)


STEP = Step(
    feature="diffsynth.eight_bit_compute",
    setting="compute",
    asked=lambda read: read.compute is not None,
    refusal=refusal,
    without="no Linear multiplies in eight bits",
    changes_blocks="frozen Linears of the blocks multiply in {value}, so bits change",
    apply=_apply,
)

FEATURE = step_feature(
    STEP,
    summary="the frozen Linears of a DiT's blocks multiply in float8 or int8 while a LoRA trains; bits change",
    relies_on=(
        "diffsynth.models.wan_video_dit:DiTBlock.forward",
        "diffsynth.models.wan_video_dit:SelfAttention.forward",
    ),
    why="Linears multiply in eight bits while it runs, and nothing afterwards",
    upstream="https://github.com/modelscope/DiffSynth-Studio: no issue is open",
    remove_when="DiffSynth's training multiplies a frozen base in eight bits",
)
