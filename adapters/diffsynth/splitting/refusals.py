"""Refusals of `diffsynth.model_split`, each with the reason, and where that is said."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from wanshim import hand_over
from wanshim.adapters.diffsynth import fp8_lora, vram
from wanshim.adapters.diffsynth.splitting import flux2, low_precision, minimax_h3, wan
from wanshim.adapters.diffsynth.splitting.family import Family, class_of, part_of
from wanshim.adapters.diffsynth.training_road import Report, TrainingCall
from wanshim.core.model_split import SplitHandle
from wanshim.core.pipeline import refusal as of_model
from wanshim.core.ranks.group import Group
from wanshim.core.ranks.host import host_ranks
from wanshim.core.sequence import check_tokens_apart
from wanshim.errors import FeatureUnavailable, ModelInvalid
from wanshim.settings import Settings, launched

log = logging.getLogger("wanshim")

FAMILIES = (wan.FAMILY, flux2.FAMILY, minimax_h3.FAMILY)


def family_of(dit: object) -> Family | None:
    """The family whose table speaks of this DiT, also where it refuses it; None for another kind of model."""
    for family in FAMILIES:
        if class_of(dit).startswith(family.modules) or type(dit).__name__ in family.refused_classes:
            return family
    return None


def dit_blocks(dit: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks of a DiT of a known family, in the order they run."""
    family = family_of(dit)
    assert family is not None  # or it had been refused
    return [block for path in family.blocks for block in dit.get_submodule(path)]


def cannot_train(variable: str, value: str | None, reason: str) -> FeatureUnavailable:
    """The refusal of a job that cannot be trained as a variable asks, by the option that set it where one did."""
    written = hand_over.as_written(variable)
    given = hand_over.as_given(variable, value)
    return FeatureUnavailable(f"{given} cannot train this model: {reason}", hint=f"Leave out {written}, or change that")


def why_left_out(dit: object, left_out: Mapping[str, str]) -> str | None:
    """Why a feature is not for the family of this DiT, or None.

    Args:
        left_out: the families that it is not for, each with the reason.
    """
    family = family_of(dit)
    found = family is not None and left_out.get(family.name)
    return f"{family.name} is left out: {found}" if family is not None and found else None


def refusal(pipe: Any) -> str | None:
    """Why this pipeline's DiT is not split, by the name of the variant, or None."""
    family = family_of(getattr(pipe, "dit", None))
    if family is None:
        return _unknown(getattr(pipe, "dit", None))
    second = family.second_of(pipe)
    reasons = [_refusal_of(dit, family) for dit in (pipe.dit, *([second.dit] if second else []))]
    return next((reason for reason in reasons if reason is not None), refused_part(pipe))


def refused_part(pipe: Any) -> str | None:
    """Why a part of this pipeline keeps its DiT from being split, or None."""
    family = family_of(getattr(pipe.dit, "_orig_mod", pipe.dit))  # of torch.compile
    parts = family.refused_parts if family is not None else {}
    return next((reason for path, reason in parts.items() if part_of(pipe, path)), None)


def _unknown(dit: object) -> str:
    """Why what a training module has as `pipe.dit` is no model that is known."""
    if dit is None:
        return "the training module has no pipe.dit"
    if hasattr(dit, "_orig_mod"):
        return (
            "torch.compile wraps pipe.dit: leave it as it was loaded, and set WANSHIM_COMPILE=1 to compile its blocks"
        )
    return f"{of_no_family(type(dit).__name__)}, or wrapped"


def of_no_family(dit_class: str) -> str:
    """The reason why a DiT of this class, which is none of those that are split, is not trained by a plan."""
    known = f"not one of {' or '.join(family.name for family in FAMILIES)}"
    of_class = (family.refused_classes[dit_class] for family in FAMILIES if dit_class in family.refused_classes)
    return f"{dit_class}: {next(of_class, known)}"


def _refusal_of(dit: torch.nn.Module, family: Family) -> str | None:
    name = type(dit).__name__
    if class_of(dit) not in family.split_classes:
        return f"{name}: {family.refused_classes.get(name, f'not one of the {family.name} DiTs that are split')}"
    return low_precision.refusal(dit)


def pipeline_refusal(handle: SplitHandle, call: TrainingCall, read: Settings) -> str | None:
    """Why accumulated micro-batches of this training job cannot overlap, or None."""
    if not read.pipeline:
        return f"{read.sources['pipeline']} is off"
    family = family_of(call.dit)
    assert family is not None  # or its job has no plan to refuse
    if family.pipeline_refusal is not None:
        return family.pipeline_refusal
    backward = getattr(call.accelerator.backward, "__func__", call.accelerator.backward)
    if not getattr(backward, "__globals__", {}).get("__name__", "").startswith("accelerate."):
        return "its accelerator has a backward of the program's own, which would run before the gradients are complete"
    outside = family.outside_the_blocks(call.pipe)
    if outside is not None:
        return f"{outside} works between the blocks, where a micro-batch cannot be cut"
    return of_model(handle.model)


def ranks_here() -> Group:
    """This process among the ranks of its machine, as the process group knows them, else as the launcher numbers
    them."""
    return host_ranks(launched())


def heads_refusal(heads: int, read: Settings) -> str | None:
    """Why the ranks that these settings ask for cannot share so many attention heads, or None."""
    named = read.plan_count if read.plan_name == "sequence" else None
    processes = ranks_here().size
    ranks = named or processes
    if ranks <= heads:
        return None
    groups = [size for size in range(2, heads + 1) if processes % size == 0]
    grouped = f" or set WANSHIM_PLAN=sequence:{groups[-1]}" if groups else ""
    return f"{ranks} ranks for {heads} attention heads, of which each computes whole ones: start {heads}{grouped}"


def placed_by_another(call: TrainingCall) -> str | None:
    """The name of what places the parameters of this training job in place of a plan, or None."""
    if call.option("enable_model_cpu_offload", False):
        return "--enable_model_cpu_offload streams the whole model through one GPU"
    if getattr(call.accelerator.state, "deepspeed_plugin", None) is not None:
        return "DeepSpeed places the parameters itself"
    if getattr(call.accelerator.state, "fsdp_plugin", None) is not None:
        return "FSDP places the parameters itself"
    return None


def conflict(call: TrainingCall, read: Settings) -> str | None:
    """The reason for which this training job, or its pipeline, goes with no plan, or None."""
    accelerator, pipe = call.accelerator, call.pipe
    if (reason := placed_by_another(call)) is not None:
        return reason
    family = family_of(call.dit)
    for name in family.second if family is not None else ():
        part = getattr(pipe, name, None)
        if part is not None and any(parameter.requires_grad for parameter in part.parameters()):
            return (
                f"{name} is to be trained, but DiffSynth's losses run `dit` alone: load the expert you train by itself"
            )
    if accelerator.num_processes > 1 and read.encode_on_cpu and str(getattr(pipe, "device", "cpu")) != "cpu":
        return (
            "the text encoder is kept on the CPU, and DDP takes a model on devices of one kind: cache the prompts first"
        )
    return refusal(pipe)


def stream_refusal(call: TrainingCall, read: Settings) -> str | None:
    """The name of what cannot be streamed in this training job, or None."""
    pipe, family = call.pipe, family_of(call.dit)
    reason = conflict(call, read)
    if reason is not None or family is None:
        return reason
    if len(family.blocks) > 1:
        return f"{family.name} runs {' and '.join(family.blocks)} one after the other, and one list is streamed"
    if (owner := family.in_place_of_blocks(pipe)) is not None:
        return f"{owner} computes a block's work from its children, past the hook that brings the block's weights"
    if read.base is not None:
        return "WANSHIM_BASE: a quantised weight is more than the bytes that are streamed"
    if vram.is_managed(pipe.dit):
        return "--fp8_models and --offload_models move the weights themselves"
    if getattr(pipe.dit, "quantize_config", None) is not None:
        return "--quant_options: a quantised weight is more than the bytes that are streamed"
    if not call.facts.checkpointing:
        return "backward needs each block's weights again: pass --use_gradient_checkpointing"
    return None


def sequence_refusal(call: TrainingCall, read: Settings) -> str | None:
    """Why the tokens of a sample cannot be sharded in this training job, by name, or None."""
    pipe, family = call.pipe, family_of(call.dit)
    reason = conflict(call, read)
    if reason is not None or family is None:
        return reason
    compiler = getattr(call.accelerator.state, "dynamo_plugin", None)
    if compiler is not None and compiler.backend != "NO":
        return (
            f"accelerate compiles the training module (dynamo_backend {compiler.backend.value}), and ranks exchange "
            "tokens inside it"
        )
    return (
        why_not_sharded(pipe, family)
        or why_sharded_by_diffsynth(pipe)
        or heads_refusal(part_of(pipe.dit.blocks[0], family.num_heads), read)
        or _why_not_apart(pipe, family)
        or _why_copied(pipe, family)
    )


def _why_not_apart(pipe: Any, family: Family) -> str | None:
    """The block in which a token's values depend on the others beside attention, or None."""
    assert family.block_lists is not None  # or no class were sharded
    try:
        check_tokens_apart(family.block_lists(pipe))
    except ModelInvalid as error:
        return error.found
    return None


def _why_copied(pipe: Any, family: Family) -> str | None:
    """A sentence on the block whose forwards compute with copies of modules in which ranks exchange tokens, or None."""
    assert family.block_lists is not None  # or no class were sharded
    for block, inside in ((block, one.inside) for one in family.block_lists(pipe) for block in one.blocks):
        if not vram.is_wrapper(block):
            continue
        own = block.module
        is_whole = type(block).__name__ == "AutoWrappedModule"  # all in it is cast
        shared = () if is_whole else fp8_lora.shared_in_copy(own)
        in_no_copy = {id(module) for outermost in shared for module in outermost.modules()}
        for path in inside:
            if id(own.get_submodule(path)) not in in_no_copy:
                return (
                    f"--fp8_models and --offload_models copy {path} of each {type(own).__name__} in every forward, "
                    "and ranks exchange tokens inside it"
                )
    return None


def why_not_sharded(pipe: Any, family: Family) -> str | None:
    """The reason for which this pipeline's forward needs all tokens on one device, or None."""
    if class_of(pipe.dit) not in family.sharded_classes:
        return not_sharded(type(pipe.dit).__name__, family)
    for owner in family.sees_all_tokens:
        if part_of(pipe, owner) is not None:
            return f"{owner} works between the blocks on all tokens"
    return None


def not_sharded(dit_class: str, family: Family) -> str:
    """The reason why the tokens of DiTs of this class stay on one device."""
    return f"{dit_class}: the tokens of {family.name}'s blocks are not sharded"


def why_sharded_by_diffsynth(pipe: Any) -> str | None:
    """That the pipeline's processes share its tokens without wanshim, or None."""
    if getattr(pipe, "use_unified_sequence_parallel", False):
        return "use_usp: DiffSynth shards this pipeline's tokens itself"
    return None


def refuse(reason: str, report: Report, strict: bool) -> None:
    """Say in report and log that nothing is split; under `strict` raise it."""
    if strict:
        raise FeatureUnavailable(f"diffsynth.model_split cannot split this model: {reason}")
    report(f"not split: {reason}")
    log.warning("wanshim: diffsynth.model_split: not split, %s", reason)
