"""`launch_training_task` over a split: made now if the pipeline came unsplit, and the loop prepared for it."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth.splitting.choice import explain_split
from wanshim.adapters.diffsynth.splitting.load import split_pipeline, trains_on_one_device
from wanshim.adapters.diffsynth.splitting.memory import find_room, put
from wanshim.adapters.diffsynth.splitting.pipelined_loop import BYPASS, PipelinedLoop, keep_out_of_ddp, save_whole
from wanshim.adapters.diffsynth.splitting.refusals import conflict, family_of, lanes_refusal, refuse, tell
from wanshim.adapters.diffsynth.splitting.second_expert import set_second_aside
from wanshim.adapters.diffsynth.splitting.side_models import lodge_before_training, lodged_on_host
from wanshim.adapters.diffsynth.splitting.streaming import stream_before_training

from wanshim import settings
from wanshim.errors import FeatureUnavailable
from wanshim.patching import SeamState
from wanshim.patching.joints import Joints

if TYPE_CHECKING:
    from wanshim.core.model_split import SplitHandle


EXPANDABLE = "; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves lanes more room"


def split_before_training(original: Any, seam: SeamState) -> Any:
    signature = inspect.signature(original)

    def launch_training_task(*args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        streams = _streams(bound.arguments)
        handle = None if streams else _prepare(bound.arguments, seam)
        with Joints() as joints:
            if streams:
                stream_before_training(bound.arguments, joints, seam)
            if handle is not None:
                set_second_aside(bound.arguments["model"].pipe, joints, seam)
                _join_loop(handle, bound.arguments, joints, seam)
            return original(*args, **kwargs)

    return launch_training_task


def _streams(arguments: dict[str, Any]) -> bool:
    """Whether each process is to train the whole DiT on one device, streamed or not."""
    from wanshim.core.model_split import split_of

    dit = getattr(getattr(arguments["model"], "pipe", None), "dit", None)
    wanted = settings.read().plan
    if dit is None or family_of(dit) is None or not trains_on_one_device(settings.read()):
        return False
    if (handle := split_of(dit)) is not None:
        if wanted is None or wanted.name != "stream":
            return False
        raise FeatureUnavailable(
            f"the DiT is split over {', '.join(handle.plan.devices)} and is to be streamed",
            expected="one of the two",
            hint="Set WANSHIM_PLAN before the pipeline is loaded",
        )
    return True


def _prepare(arguments: dict[str, Any], seam: SeamState) -> SplitHandle | None:
    """The split to train with, made now if the pipeline came unsplit."""
    from wanshim.core.model_split import split_of

    pipe = getattr(arguments["model"], "pipe", None)
    dit = getattr(pipe, "dit", None)
    if dit is None or family_of(dit) is None:
        return None  # another kind of model: not this feature's
    reason = conflict(arguments)
    handle = split_of(dit)
    if reason is not None and handle is not None:
        raise FeatureUnavailable(
            f"the DiT is split over {', '.join(handle.plan.devices)} and {reason}",
            expected="one of the two",
            hint="Leave that option out, or run with WANSHIM_FEATURES=...,-diffsynth.model_split",
        )
    if reason is not None:
        refuse(reason, seam, settings.read().strict)
        return None
    if handle is None:
        split_pipeline(pipe, seam)
    _check_nothing_quantized_trains(dit)
    return split_of(dit)


def _join_loop(handle: SplitHandle, arguments: dict[str, Any], joints: Joints, seam: SeamState) -> None:
    """Prepare the loop for a split model: whole files, DDP, and lanes where micro-batches can overlap."""
    from wanshim.core.pipeline import Lanes, pipeline_bound

    accelerator, read, say = arguments["accelerator"], settings.read(), partial(tell, seam=seam)
    joints.replace(accelerator, "save", save_whole)
    count, stages = accelerator.gradient_accumulation_steps, len(handle.plan.stages)
    wanted = read.plan.name if read.plan is not None else None
    reason = "WANSHIM_PLAN=split" if wanted == "split" else lanes_refusal(handle, arguments)
    in_flight = 1 if reason is not None else count
    lodge_before_training(handle, arguments, say, in_flight=in_flight)
    if accelerator.num_processes > 1:
        joints.set_variable(BYPASS, "true")
        seam.notes.append(f"{BYPASS}=true: each of {accelerator.num_processes} processes trains a split of its own")
        keep_out_of_ddp(arguments["model"], _not_for_ddp(arguments["model"]), joints)
    room = find_room(handle, arguments, say, in_flight=in_flight)
    if room.in_flight < in_flight:
        reason = "several in flight would not fit, one does" + ("" if read.expandable_segments else EXPANDABLE)
    if reason is not None and wanted == "lanes" and read.strict:
        raise FeatureUnavailable(f"WANSHIM_PLAN=lanes cannot be had: {reason}")
    explain_split(arguments, handle.plan.devices, lanes=reason is None, tell=say)
    put(room, arguments, joints, say)
    if reason is not None:
        say(f"one micro-batch at a time: {reason}; the split gives room, not speed")
        return
    loop = PipelinedLoop(Lanes(handle), accelerator, arguments["model"], arguments["model_logger"])
    loop.attach(joints)
    bound = pipeline_bound(stages, count)
    say(f"{count} micro-batches in {stages} lanes: at most {bound:.2f}x of one GPU's speed")


def _check_nothing_quantized_trains(dit: Any) -> None:
    from wanshim.core.model_split.quantize import quantized_names

    names = quantized_names(dit, trained=True)
    if names:
        raise FeatureUnavailable(
            f"{len(names)} quantised weights are to be trained, the first is {names[0]}",
            expected="a frozen base with LoRA on top",
            hint="Train LoRA, or leave WANSHIM_BASE and --quant_options out",
        )


def _not_for_ddp(model: Any) -> list[str]:
    """DDP can neither flatten a quantised weight nor mix GPU and host. Such weights are frozen, and every process has
    them from the same file."""
    from wanshim.core.model_split.quantize import quantized_names

    return [*quantized_names(model, trained=False), *lodged_on_host(model)]
