"""The road of a training call: read the job, decide, agree, apply each step. What is changed ends with the task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wanshim.adapters.diffsynth import checkpoint_offload, encode_cache, kept_attention, kept_blocks, resume
from wanshim.adapters.diffsynth.splitting import low_precision, refusals, side_models
from wanshim.adapters.diffsynth.splitting.facts import ForwardWatch, read_facts
from wanshim.adapters.diffsynth.splitting.job import block_changes, named_plan, read_job
from wanshim.adapters.diffsynth.splitting.load import split_pipeline, too_few_devices, trains_on_one_device
from wanshim.adapters.diffsynth.splitting.own_loop import expect_steps
from wanshim.adapters.diffsynth.splitting.steps import STEPS
from wanshim.adapters.diffsynth.training_road import MODEL_SPLIT, Row, Run, RunFacts, Step, TrainingCall
from wanshim.core.model_split import SplitHandle, split_of
from wanshim.core.model_split.quantize import quantize_base, quantized_names
from wanshim.core.shared import host_memory
from wanshim.core.shared.weight_bytes import host_bytes
from wanshim.core.strategy import (
    Limits,
    Strategy,
    TrainingJob,
    TrainingPlan,
    available_on,
    check_alike,
    decide,
    decide_again,
    failing_together,
    idle_on_all,
    least_of_all,
)
from wanshim.errors import FeatureUnavailable, PlacementInvalid
from wanshim.settings import FAST, Settings
from wanshim.undo import Undo

if TYPE_CHECKING:
    from wanshim.patching import SeamState

KEPT = "diffsynth.kept_attention"
KEPT_IN_BACKWARD = (checkpoint_offload.STEP, kept_attention.STEP, kept_blocks.STEP)
SIZED = {MODEL_SPLIT, KEPT, checkpoint_offload.STEP.feature}  # features whose plan rests on the facts of the run


def prepare(call: TrainingCall, on: Mapping[str, SeamState], undo: Undo) -> None:
    """Decide how this job runs, and make it so until `undo` is removed.

    Args:
        on: the seam of each feature that is on, `diffsynth.model_split` among them if the run is to be planned over
            devices and processes.

    Raises:
        FeatureUnavailable: the plan that the user named is unavailable here, or under strict a step.
        PlacementInvalid: no plan fits.
        RanksFailed: the ranks have no plan in common.
    """
    lead = on.get(MODEL_SPLIT) or next(iter(on.values()))
    read, is_sized = lead.settings, bool(SIZED & on.keys())
    if is_sized and call.dit is not None:
        call = replace(call, known=read_facts(call))
    if MODEL_SPLIT in on:
        expect_steps(undo)
    with failing_together():
        planned = MODEL_SPLIT in on and _is_planned(call, read, on[MODEL_SPLIT])
        left_out = _refused(call, read, on, planned)
        handle = _placed(call, read, lead, undo) if planned else None
        encodes = planned and encode_cache.STEP.feature in on and encode_cache.STEP.asked(read)
        idle = frozenset[str]()
        if encodes and encode_cache.STEP.without not in left_out:
            report = on[encode_cache.STEP.feature].notes.append
            idle = idle_on_all(encode_cache.encode_missing(call, read, undo, report))
        job_of = partial(read_job, call, handle, planned=planned, keeps=planned or KEPT in on, idle=idle)
        job = job_of(read) if is_sized else None
        limits = least_of_all(_limits(call, job, read) if job is not None else Limits())
        if job is not None:
            plan = _first_plan(chain([job], map(job_of, _without_what_fast_asked(read))), limits)
            left_out |= _left_out(job, plan)
        else:
            plan = TrainingPlan(
                strategy=Strategy.RESIDENT,
                devices=(str(call.device),),
                step=None,
                block_changes=block_changes(call, read),
            )
        plan = replace(plan, saves_state=resume.STEP.feature in on and resume.STEP.asked(read))
        check_alike(plan)
    for text in filter(None, (*plan.notes, plan.choice)):
        lead.notes.append(text)
    ran = _trains_a_step(undo)
    rows = {
        # the plan has more than one step, and its row is nobody's own
        step.feature: Row(seam.notes, seam, ran)
        if step.feature != MODEL_SPLIT and (seam := on.get(step.feature)) is not None
        else Row(lead.notes, ran=ran)
        for step in STEPS
    }
    run = Run(call=call, read=read, plan=plan, handle=handle, undo=undo)
    kept = KeptInBackward(run, rows, job, limits)
    for step in STEPS:
        row = rows[step.feature]
        if step.without in left_out:
            row.without_effect(f"{step.without}: {left_out[step.without]}")
            continue
        if step.changes_blocks:
            if step.feature not in plan.block_changes:
                step.not_asked(row)
                continue
            row.report(plan.block_changes[step.feature])
        if not step.on(run):
            continue
        if step in KEPT_IN_BACKWARD:
            kept.apply(step)
        else:
            step.apply(run, row)
    if call.known is not None and hasattr(call.pipe, "model_fn"):
        ForwardWatch(call, undo, kept.plan_again)
    if plan.outcome:
        lead.notes.append(plan.outcome)
    if MODEL_SPLIT in on and plan.changes_nothing and read.base is None:
        on[MODEL_SPLIT].not_needed("the plan changes nothing: the model is trained as DiffSynth trains it")


def _trains_a_step(undo: Undo) -> Callable[[], bool]:
    """Whether an optimizer has stepped since, asked until `undo` is removed or later."""
    stepped: list[bool] = []
    undo.add(register_optimizer_step_pre_hook(lambda *_: stepped.append(True) if not stepped else None).remove)
    return lambda: bool(stepped)


class KeptInBackward:
    """The steps of a run that say what backward keeps and where that waits: all of a plan that can still change when
    training has begun.

    Args:
        job, limits: those that the plan was made for; None: the run is not planned.
    """

    def __init__(self, run: Run, rows: Mapping[str, Row], job: TrainingJob | None, limits: Limits) -> None:
        self._run, self._rows, self._job, self._limits = run, rows, job, limits
        self._steps: list[Step] = []
        self._undo = Undo()

    def apply(self, step: Step) -> None:
        """Apply a step, until the run ends or its plan changes."""
        if not self._steps:
            self._run.undo.add(self._undo.remove)
        self._steps.append(step)
        self._apply(step)

    def _apply(self, step: Step) -> None:
        step.apply(replace(self._run, undo=self._undo), self._rows[step.feature])

    def plan_again(self, facts: RunFacts, *, ran: bool) -> None:
        """Decide anew for facts that differ from those of the plan.

        Args:
            ran: the first forward has been computed; else it is about to be, and what it keeps can change.

        Raises:
            PlacementInvalid: the step does not fit, with both sizes.
        """
        plan, job = self._run.plan, self._job
        assert job is not None  # or no facts were known
        new = replace(
            job, video=facts.video, sizes="", checkpointing=facts.checkpointing, offloads_itself=facts.offloading
        )
        self._job = new
        if job.unpredictable or not self._limits.available:
            return
        found, planned = (_described(one) for one in (new, job))
        try:
            again = decide_again(new, self._limits, plan)
        except PlacementInvalid as error:
            raise PlacementInvalid(
                f"a forward of {found} does not fit the plan, which was made for {planned}: {error.found}",
                expected=error.expected,
                hint="Put the largest samples first in the dataset: the plan is made for the largest of some that are "
                "looked at when training begins",
            ) from None
        changes = again.shared != plan.shared
        if changes or job.sizes:
            what = again.kept_attention or again.kept_blocks_text or "nothing is kept" if changes else "the plan stays"
            self._rows[MODEL_SPLIT].report(f"planned again for {found}, after {planned}: {what}")
        if not changes or ran or plan.strategy is Strategy.PIPELINE:
            return
        self._run = replace(self._run, plan=again)
        changing = {self._rows[step.feature] for step in self._steps}
        for row in changing:
            row.muted = True
        self._undo.remove()
        for row in changing:
            row.muted = False
        for step in self._steps:
            self._apply(step)


def _described(job: TrainingJob) -> str:
    recomputed = "recomputed" if job.checkpointing else "kept"
    size = f"{job.video.tokens} tokens" if job.video is not None else "unknown size"
    return f"{size}{' (assumed)' * bool(job.sizes)} with activations {recomputed}"


def _limits(call: TrainingCall, job: TrainingJob, read: Settings) -> Limits:
    return Limits(
        available=available_on(job.devices),
        host=_host_memory(call, job),
        expandable_segments=read.expandable_segments,
    )


def _host_memory(call: TrainingCall, job: TrainingJob) -> int:
    """Bytes of host memory for this process. The plan leaves half to weights and others; weights that are there already
    count as available once more, so that they are not left room twice. Streamed ones stay: a third at most."""
    available = host_memory.available_bytes() // job.local_processes
    if call.dit is None:
        return available
    waiting = host_bytes(call.dit)
    others = max(0, host_bytes(call.model) - waiting)
    allocated = max(0, host_memory.own_bytes() - others)  # what is mapped from files is available already
    return available + min(waiting, allocated, available // 3)


def _refused(call: TrainingCall, read: Settings, on: Mapping[str, SeamState], planned: bool) -> dict[str, str]:
    """Why what the settings ask for is not done, by the statement that it is not.

    Raises:
        FeatureUnavailable: likewise, under strict, or the run would be another one without it.
    """
    found = {}
    for step in STEPS:
        taken = step.feature in on or (planned and not step.required)
        of_the_plan = step.feature == MODEL_SPLIT and (step.required or not planned)
        if of_the_plan or not taken or not step.asked(read):
            continue
        left_out = on[step.feature].left_out if step.feature in on else {}
        if (reason := refusals.why_left_out(call.dit, left_out) or step.refusal(call, read)) is not None:
            variable = read.sources.get(step.setting, step.setting)
            if step.required or read.insists_on(step.setting):
                raise FeatureUnavailable(f"{variable} is unavailable here: {reason}", hint=f"Unset {variable}")
            step.warn(reason)
            found[step.without] = reason
    return found


def _first_plan(jobs: Iterable[TrainingJob], limits: Limits) -> TrainingPlan:
    """The plan of the first of these jobs that has one, else the error of the last."""
    for job in jobs:
        try:
            plan = decide(job, limits)
            _check_pipeline(plan, job)
        except (PlacementInvalid, FeatureUnavailable) as error:
            reason = error
        else:
            return plan
    raise reason


def _without_what_fast_asked(read: Settings) -> Iterator[Settings]:
    """The settings without eight-bit compute, then without compiled blocks too, as far as WANSHIM_FAST turned them on.
    Eight-bit products take memory, and compiled blocks cannot run in chunks."""
    for field in ("compute", "compile"):
        if read.sources.get(field) == FAST:
            read = replace(read, **{field: getattr(Settings(), field)})
            yield read


def _left_out(job: TrainingJob, plan: TrainingPlan) -> dict[str, str]:
    """Why what the job asks of the blocks is not in the plan, by the statement that it is not."""
    reason = f"the step does not fit with it, and {FAST} asks for what is available"
    left = [step for step in STEPS if step.feature in job.request.block_changes.keys() - plan.block_changes.keys()]
    for step in left:
        step.warn(reason)
    return {step.without: reason for step in left}


# Whether devices and processes are wanshim's to plan


def _is_planned(call: TrainingCall, read: Settings, seam: SeamState) -> bool:
    """Else the job is trained as DiffSynth would, and the report says why.

    Raises:
        FeatureUnavailable: the user named a plan, or wants weights in eight bits: without, a step would have other
            samples, or the model no room.
    """
    reason, named = _refusal(call, read, seam), named_plan(read)
    if reason is None:
        return True
    if named is not None or read.base is not None:
        variable, value = ("WANSHIM_PLAN", named) if named is not None else ("WANSHIM_BASE", read.base)
        raise refusals.cannot_train(variable, value, reason)
    if trains_on_one_device(read):
        seam.fall_back(f"not planned: {reason}")
    else:
        refusals.refuse(reason, seam.fall_back, read.strict)
    return False


def _refusal(call: TrainingCall, read: Settings, seam: SeamState) -> str | None:
    """Why this job is not planned, or None.

    Raises:
        FeatureUnavailable: its model is split, and something else is asked for.
    """
    handle, named = split_of(call.dit), named_plan(read)
    reason = refusals.why_left_out(call.dit, seam.left_out)
    if handle is not None and named in ("stream", "sequence"):
        reason = f"the plan is {named}"
    elif reason is None:
        steps = (step for step in STEPS if step.feature == MODEL_SPLIT and step.required and step.asked(read))
        reasons = (step.refusal(call, read) for step in steps)
        reason = refusals.conflict(call, read) or next(filter(None, reasons), None)
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


def _placed(call: TrainingCall, read: Settings, seam: SeamState, undo: Undo) -> SplitHandle | None:
    """The split to train with, made now if the pipeline came unsplit; None if the model stays whole."""
    report = seam.notes.append
    whole = trains_on_one_device(read) and split_of(call.dit) is None
    if not whole and split_of(call.dit) is None:
        split_pipeline(call.pipe, read, seam)
    _check_nothing_quantized_trains(call.dit)
    if whole and read.base is not None:
        count = quantize_base(refusals.dit_blocks(call.dit), read.base, compute_device=call.device)
        report(f"{count} frozen Linear weights are stored as {read.base}: WANSHIM_BASE")
    if read.base is not None:
        low_precision.refuse_safetensors(call.accelerator, call.model, read.base, undo)
    for name in side_models.offload_untrained_expert(call.pipe, undo):
        report(f"{name} is not trained and waits on the CPU")
    return split_of(call.dit)


def _check_nothing_quantized_trains(dit: torch.nn.Module) -> None:
    names = quantized_names(dit, trained=True)
    if names:
        raise FeatureUnavailable(
            f"{len(names)} quantised weights are to be trained, the first is {names[0]}",
            expected="a frozen base with LoRA on top",
            hint="Train LoRA, or leave WANSHIM_BASE and --quant_options out",
        )


def _check_pipeline(plan: TrainingPlan, job: TrainingJob) -> None:
    """A pipeline that was named is a pipeline: a split alone is no faster than one GPU."""
    if job.request.strategy is Strategy.PIPELINE and plan.strategy is not Strategy.PIPELINE:
        raise FeatureUnavailable(
            f"WANSHIM_PLAN=pipeline is unavailable: {plan.rejection_of(Strategy.PIPELINE)}",
            hint="WANSHIM_PLAN=auto takes the first plan that can run",
        )
