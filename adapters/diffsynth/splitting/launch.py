"""`launch_training_task` with a plan: the call is read, the plan decided and applied, and undone when the task ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.adapters.diffsynth.splitting import side_models
from wanshim.adapters.diffsynth.splitting.apply import apply
from wanshim.adapters.diffsynth.splitting.job import measure_limits, read_job
from wanshim.adapters.diffsynth.splitting.load import split_pipeline, trains_on_one_device
from wanshim.adapters.diffsynth.splitting.refusals import (
    conflict,
    family_of,
    note,
    refuse,
    sequence_refusal,
    stream_refusal,
)
from wanshim.adapters.diffsynth.splitting.sequence import report_failure
from wanshim.adapters.diffsynth.training_call import TrainingCall
from wanshim.errors import FeatureUnavailable
from wanshim.patching import SeamState
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.model_split import SplitHandle
    from wanshim.core.strategy import Limits, TrainingJob, TrainingPlan


def split_before_training(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def launch_training_task(*args: object, **kwargs: object) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        with Undo() as undo:
            call = TrainingCall.bind(signature, args, kwargs)
            try:
                _prepare(call, settings.read(), undo, seam)
                return original(*args, **kwargs)
            except BaseException as error:
                report_failure(call.dit, error)
                raise

    return launch_training_task


def _prepare(call: TrainingCall, read: settings.Settings, undo: Undo, seam: SeamState) -> None:
    """Decide how this job runs, and make it so until `undo` is removed."""
    if call.dit is None or family_of(call.dit) is None:
        return  # another kind of model: not this feature's
    handle, report = None, partial(note, seam=seam)
    if _trains_whole(call, read):
        if not _can_train_whole(call, read, seam):
            return
        if read.base is not None:
            report(_store_base(call, read.base))
    elif (handle := _split(call, read, seam)) is None:
        return
    for name in side_models.offload_untrained_expert(call.pipe, undo):
        report(f"{name} is not trained and waits on the CPU")
    job = read_job(call, handle, read)
    plan = _agreed(job, measure_limits(job, read), call)
    _check_pipeline(plan, job, read)
    apply(plan, call, handle, read, undo, report)


def _trains_whole(call: TrainingCall, read: settings.Settings) -> bool:
    """Whether each process is to train the whole DiT on one device, streamed or not."""
    from wanshim.core.model_split import split_of

    if not trains_on_one_device(read):
        return False
    if (handle := split_of(call.dit)) is None:
        return True
    if read.plan is None or read.plan.name == "auto":
        return False
    raise FeatureUnavailable(
        f"the DiT is split over {', '.join(handle.plan.devices)} and the plan is {read.plan.name}",
        expected="one of the two",
        hint="Set WANSHIM_PLAN before the pipeline is loaded",
    )


def _can_train_whole(call: TrainingCall, read: settings.Settings, seam: SeamState) -> bool:
    """Whether this job can be streamed; the report says why not. It is then trained where DiffSynth puts it.

    Raises:
        FeatureUnavailable: it is to be sharded and cannot be: trained otherwise, a step would have more samples.
    """
    if read.plan is not None and read.plan.name == "sequence":
        if (reason := sequence_refusal(call, read)) is not None:
            raise FeatureUnavailable(
                f"WANSHIM_PLAN=sequence cannot train this model: {reason}", hint="Choose another plan, or unset it"
            )
        return True
    reason = stream_refusal(call, read)
    if reason is None:
        return True
    automatic = read.plan is not None and read.plan.name == "auto"
    if read.strict and not automatic:
        raise FeatureUnavailable(f"diffsynth.model_split cannot stream this model's weights: {reason}")
    note(f"not streamed: {reason}", seam)
    return False


def _split(call: TrainingCall, read: settings.Settings, seam: SeamState) -> SplitHandle | None:
    """The split to train with, made now if the pipeline came unsplit."""
    from wanshim.core.model_split import split_of

    reason, handle = conflict(call, read), split_of(call.dit)
    if reason is not None and handle is not None:
        raise FeatureUnavailable(
            f"the DiT is split over {', '.join(handle.plan.devices)} and {reason}",
            expected="one of the two",
            hint="Leave that option out, or run with WANSHIM_FEATURES=...,-diffsynth.model_split",
        )
    if reason is not None:
        refuse(reason, seam, read.strict)
        return None
    if handle is None:
        split_pipeline(call.pipe, read, seam)
    _check_nothing_quantized_trains(call.dit)
    return split_of(call.dit)


def _store_base(call: TrainingCall, base: str) -> str:
    """The frozen weights of the blocks in eight bits, as a split stores them when it is made."""
    from wanshim.core.model_split.quantize import quantize_base

    _check_nothing_quantized_trains(call.dit)
    count = quantize_base(call.dit.blocks, base, compute_device=call.accelerator.device)
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


def _agreed(job: TrainingJob, limits: Limits, call: TrainingCall) -> TrainingPlan:
    """The plan, the same on all processes: sequence parallel where one of them needs it, and as many streamed blocks as
    the one that needs most, for all share one copy of them, and DDP must leave the same weights alone in all."""
    import torch

    from wanshim.core.strategy import Strategy, decide

    plan = decide(job, limits)
    if job.split_points is not None or job.processes == 1:
        return plan
    mine = [plan.strategy is Strategy.SEQUENCE, plan.streamed_blocks]
    most = torch.tensor(mine, dtype=torch.int64, device=call.accelerator.device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    sharded, streamed = most.tolist()
    if [sharded, streamed] == mine:
        return plan
    strategy = Strategy.SEQUENCE if sharded else Strategy.STREAM
    return decide(
        replace(job, request=replace(job.request, strategy=strategy, streamed_blocks=streamed or None)), limits
    )


def _check_pipeline(plan: TrainingPlan, job: TrainingJob, read: settings.Settings) -> None:
    from wanshim.core.strategy import Strategy

    if read.strict and job.request.strategy is Strategy.PIPELINE and plan.strategy is not Strategy.PIPELINE:
        raise FeatureUnavailable(
            f"WANSHIM_PLAN=pipeline is unavailable: {plan.rejection_of(Strategy.PIPELINE)}",
            hint="WANSHIM_PLAN=auto takes the fastest plan that can run",
        )
