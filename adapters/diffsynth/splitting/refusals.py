"""What `diffsynth.model_split` does not split, each with the reason, and where that is said."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.splitting import flux2 as flux2_placement
from wanshim.adapters.diffsynth.splitting import low_precision as quantized_base
from wanshim.adapters.diffsynth.splitting import wan as wan_placement
from wanshim.adapters.diffsynth.splitting.family import Family, class_of

from wanshim import settings
from wanshim.errors import FeatureUnavailable

if TYPE_CHECKING:
    from wanshim.core.model_split import SplitHandle
    from wanshim.patching import SeamState

log = logging.getLogger("wanshim")

FAMILIES = (wan_placement.FAMILY, flux2_placement.FAMILY)


def family_of(dit: Any) -> Family | None:
    """The family whose table speaks of this DiT, also where it refuses it; None for another kind of model."""
    for family in FAMILIES:
        if class_of(dit).startswith(family.modules) or type(dit).__name__ in family.refused_classes:
            return family
    return None


def refusal(pipe: Any) -> str | None:
    """Why this pipeline's DiT is not split, by the name of the variant, or None."""
    family = family_of(pipe.dit)
    if family is None:
        return f"{type(pipe.dit).__name__}: not one of {' or '.join(family.name for family in FAMILIES)}"
    second = family.second_of(pipe)
    reasons = [_refusal_of(dit, family) for dit in (pipe.dit, *([second.dit] if second else []))]
    return next((reason for reason in reasons if reason is not None), None)


def _refusal_of(dit: Any, family: Family) -> str | None:
    name = type(dit).__name__
    if class_of(dit) not in family.split_classes:
        return f"{name}: {family.refused_classes.get(name, f'not one of the {family.name} DiTs that are split')}"
    return quantized_base.refusal(dit)


def lanes_refusal(handle: SplitHandle, arguments: dict[str, Any]) -> str | None:
    """Why micro-batches of this training job cannot overlap, or None."""
    from wanshim.core.pipeline import refusal as of_model

    if not settings.read().lanes:
        return "WANSHIM_LANES is off"
    if arguments["accelerator"].gradient_accumulation_steps == 1:
        return "gradient accumulation is 1, and only accumulated micro-batches can overlap"
    pipe = arguments["model"].pipe
    family = family_of(pipe.dit)
    assert family is not None  # or it had not been split
    if family.lanes_refusal is not None:
        return family.lanes_refusal
    outside = family.outside_the_blocks(pipe)
    if outside is not None:
        return f"{outside} works between the blocks, where a micro-batch cannot be cut"
    return of_model(handle.model)


def conflict(arguments: dict[str, Any]) -> str | None:
    """What in this training job does not go with a split."""
    args, accelerator = arguments.get("args"), arguments["accelerator"]
    offload = getattr(args, "enable_model_cpu_offload", arguments.get("enable_model_cpu_offload", False))
    if offload:
        return "--enable_model_cpu_offload streams the whole model through one GPU"
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return "DeepSpeed places the parameters itself"
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return "FSDP places the parameters itself"
    pipe = arguments["model"].pipe
    family = family_of(pipe.dit)
    for name in family.second if family is not None else ():
        part = getattr(pipe, name, None)
        if part is not None and any(parameter.requires_grad for parameter in part.parameters()):
            return (
                f"{name} is to be trained, but DiffSynth's losses run `dit` alone: load the expert you train by itself"
            )
    if accelerator.num_processes > 1 and settings.read().encode_on_cpu and str(pipe.device) != "cpu":
        return (
            "the text encoder is kept on the CPU, and DDP takes a model on devices of one kind: cache the prompts first"
        )
    return None


def blocked(read: settings.Settings) -> str | None:
    processes, devices = read.local_world_size, read.devices
    if read.plan is not None and (read.plan.name == "stream" or (read.plan.name == "auto" and devices is None)):
        return None  # one device a process, the one accelerate gives it
    if processes > 1 and devices is not None and (len(devices) % processes or len(devices) < 2 * processes):
        return (
            f"{processes} processes share this machine (LOCAL_WORLD_SIZE) and {len(devices)} devices are named; "
            f"a split for each takes {2 * processes} or another multiple of {processes}"
        )
    return None


def refuse(reason: str, seam: SeamState, strict: bool) -> None:
    """Say in report and log that nothing is split; under `strict` raise it."""
    if strict:
        raise FeatureUnavailable(f"diffsynth.model_split cannot split this model: {reason}")
    seam.notes.append(f"not split: {reason}")
    log.warning("wanshim: diffsynth.model_split: not split, %s", reason)


def tell(text: str, seam: SeamState) -> None:
    seam.notes.append(text)
    log.info("wanshim: diffsynth.model_split: %s", text)
