"""A training run with a plan: the call is read, the plan decided, shared by all ranks and applied, and undone when the
task ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wanshim import settings
from wanshim.adapters.diffsynth.splitting import refusals, side_models
from wanshim.adapters.diffsynth.splitting.apply import apply
from wanshim.adapters.diffsynth.splitting.job import measure_limits, read_job
from wanshim.adapters.diffsynth.splitting.load import split_pipeline, too_few_devices, trains_on_one_device
from wanshim.adapters.diffsynth.splitting.own_loop import expect_steps
from wanshim.adapters.diffsynth.training_call import TrainingCall
from wanshim.errors import FeatureUnavailable
from wanshim.patching import SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.model_split import SplitHandle
    from wanshim.core.strategy import Limits, TrainingJob, TrainingPlan


def plan_run(call: TrainingCall, undo: Undo, seam: SeamState) -> None:
    """Decide how this job runs, and make it so until `undo` is removed.

    Raises:
        FeatureUnavailable: the plan that the user named is unavailable here.
        PlacementInvalid: no plan fits.
        PlanFailed: the ranks have no plan in common.
    """
    from wanshim.core.strategy import agreed, decide

    read, say = settings.read(), seam.notes.append
    expect_steps(undo)

    made: list[tuple[TrainingJob, SplitHandle | None]] = []

    def measure() -> Limits:
        from wanshim.core.strategy import Limits

        if (reason := _refusal(call, read)) is not None:
            _leave(reason, read, seam)
            return Limits()
        handle = None if _trains_whole(call, read) else _split(call, read, seam)
        if handle is None and read.base is not None:
            say(_store_base(call, read.base))
        for name in side_models.offload_untrained_expert(call.pipe, undo):
            say(f"{name} is not trained and waits on the CPU")
        job = read_job(call, handle, read)
        made.append((job, handle))
        return measure_limits(job, read)

    def plan_for(limits: Limits) -> TrainingPlan | None:
        if not made:
            return None
        plan = decide(made[0][0], limits)
        _check_pipeline(plan, made[0][0])
        return plan

    plan = agreed(plan_for, measure)
    if plan is not None:
        apply(plan, call, made[0][1], read, undo, say)


def _named(read: settings.Settings) -> str | None:
    """The plan that the user named, if that is not left to wanshim."""
    return read.plan.name if read.plan is not None and read.plan.name != "auto" else None


def _refusal(call: TrainingCall, read: settings.Settings) -> str | None:
    """Why this job is not planned, or None.

    Raises:
        FeatureUnavailable: its model is split, and something else is asked for.
    """
    from wanshim.core.model_split import split_of

    handle = split_of(call.dit) if call.dit is not None else None
    named = _named(read)
    if handle is not None and named in ("stream", "sequence"):
        reason: str | None = f"the plan is {named}"
    else:
        reason = refusals.conflict(call, read) or refusals.refusal(call.pipe)
        if reason is None and named == "sequence":
            reason = refusals.sequence_refusal(call, read)
        if reason is None and named == "stream":
            reason = refusals.stream_refusal(call, read)
    if reason is None and handle is None and not trains_on_one_device(read):
        reason = too_few_devices(read)
    if reason is not None and handle is not None:
        raise FeatureUnavailable(
            f"the DiT is split over {', '.join(handle.plan.devices)} and {reason}",
            expected="one of the two",
            hint="Leave that option out, set WANSHIM_PLAN before the pipeline is loaded, or run with "
            "WANSHIM_FEATURES=...,-diffsynth.model_split",
        )
    return reason


def _leave(reason: str, read: settings.Settings, seam: SeamState) -> None:
    """The job is trained as DiffSynth would, and the report says why.

    Raises:
        FeatureUnavailable: the user named a plan, or wants weights in eight bits: without, a step would have other
            samples, or the model no room.
    """
    named = _named(read)
    asked = f"WANSHIM_PLAN={named}" if named is not None else f"WANSHIM_BASE={read.base}"
    if named is not None or read.base is not None:
        raise FeatureUnavailable(
            f"{asked} cannot train this model: {reason}", hint=f"Unset {asked.partition('=')[0]}, or change that"
        )
    if trains_on_one_device(read):
        seam.fall_back(f"not planned: {reason}")
    else:
        refusals.refuse(reason, seam.fall_back, read.strict)


def _trains_whole(call: TrainingCall, read: settings.Settings) -> bool:
    """Whether each process trains the whole DiT on one device, streamed or not."""
    from wanshim.core.model_split import split_of

    return trains_on_one_device(read) and split_of(call.dit) is None


def _split(call: TrainingCall, read: settings.Settings, seam: SeamState) -> SplitHandle | None:
    """The split to train with, made now if the pipeline came unsplit."""
    from wanshim.core.model_split import split_of

    if split_of(call.dit) is None:
        split_pipeline(call.pipe, read, seam)
    _check_nothing_quantized_trains(call.dit)
    return split_of(call.dit)


def _store_base(call: TrainingCall, base: str) -> str:
    """The frozen weights of the blocks in eight bits, as a split stores them when it is made."""
    from wanshim.core.model_split.quantize import quantize_base

    _check_nothing_quantized_trains(call.dit)
    count = quantize_base(refusals.blocks_of(call.dit), base, compute_device=call.device)
    return f"{count} frozen Linear weights are stored as {base}: WANSHIM_BASE"


def _check_nothing_quantized_trains(dit: torch.nn.Module) -> None:
    from wanshim.core.model_split.quantize import quantized_names

    names = quantized_names(dit, trained=True)
    if names:
        raise FeatureUnavailable(
            f"{len(names)} quantised weights are to be trained, the first is {names[0]}",
            expected="a frozen base with LoRA on top",
            hint="Train LoRA, or leave WANSHIM_BASE and --quant_options out",
        )


def _check_pipeline(plan: TrainingPlan, job: TrainingJob) -> None:
    """A pipeline that was named is a pipeline: a split alone is no faster than one GPU."""
    from wanshim.core.strategy import Strategy

    if job.request.strategy is Strategy.PIPELINE and plan.strategy is not Strategy.PIPELINE:
        raise FeatureUnavailable(
            f"WANSHIM_PLAN=pipeline is unavailable: {plan.rejection_of(Strategy.PIPELINE)}",
            hint="WANSHIM_PLAN=auto takes the fastest plan that can run",
        )
