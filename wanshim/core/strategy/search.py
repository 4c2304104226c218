"""The choice of a training plan: one search, from the job and the machine's limits alone. No device is touched here,
and nothing changes.

A strategy has candidates in an order (`candidates.py`), and the first that fits is its plan. The first strategy that
has a plan and that no row of `why_not` rules out is taken, and the others are its alternatives.

A new strategy is a member of `Strategy`, its bound and its rows in `choice.py`, and an entry of `PLANS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from wanshim.core.model_split.plan import format_bytes
from wanshim.core.model_split.side_models import HOST, choose_devices, describe_move
from wanshim.core.pipeline.schedule import pipeline_bound
from wanshim.core.strategy.candidates import candidates, first_that_fits, why_no_block_is_kept, with_kept_blocks
from wanshim.core.strategy.choice import choose, explain, why_not
from wanshim.core.strategy.job import Limits, TrainingJob
from wanshim.core.strategy.limits import by_device, fits, without_gaps
from wanshim.core.strategy.plan import Alternative, TrainingPlan
from wanshim.core.strategy.predict import DevicePeak, MicroBatch, predict
from wanshim.core.strategy.shortfall import check_fit, lack
from wanshim.errors import PlacementInvalid
from wanshim.values import Strategy


def decide(job: TrainingJob, limits: Limits) -> TrainingPlan:
    """The plan for a job, with every strategy that was not taken and the reason.

    Raises:
        PlacementInvalid: no step fits, with what would; or the requested strategy cannot run.
    """
    idle = _idle(job)
    plan = _decide(job, limits, idle, waiting=idle)
    # With assumed sizes a larger sample may need their room, and when training has begun they cannot leave any more.
    if idle and not job.sizes and (beside := _tried(partial(_decide, idle=idle), job, limits)) is not None:
        has_room = not limits.available or (beside.peaks and fits(beside.peaks, without_gaps(limits.available)))
        leaving = {**beside.side_models, **dict.fromkeys(idle, HOST)}  # no model that steps call leaves in their place
        if has_room and replace(beside, side_models=leaving).shared == plan.shared:
            return beside
    return plan


def _idle(job: TrainingJob) -> list[str]:
    """Side models that no step calls, and that can leave."""
    return [name for name, model in job.side_models.items() if name in job.request.idle and model.movable]


def _decide(job: TrainingJob, limits: Limits, idle: Sequence[str], waiting: Sequence[str] = ()) -> TrainingPlan:
    """The plan once side models have left.

    Args:
        idle: side models that no step calls.
        waiting: those of them that wait in host memory.
    """
    assumed = (job.sizes,) if job.sizes and not job.unpredictable else ()
    leaving = sum(job.side_models[name].num_bytes for name in waiting)
    job = replace(
        job,
        home=replace(job.home, frozen=job.home.frozen - leaving),
        side_models={name: model for name, model in job.side_models.items() if name not in idle},
    )
    limits = replace(limits, host=max(0, limits.host - leaving))
    try:
        plan = _plan(job, limits)
    except PlacementInvalid as error:
        error.found = "; ".join((error.found, *assumed))
        raise
    said = f"{' and '.join(waiting)} ({format_bytes(leaving)}) wait in host memory: what they encode is there"
    notes = (*[said] * bool(waiting), *plan.notes, *_notes_on_kept_blocks(job, limits, plan), *assumed)
    moves = {**plan.side_models, **dict.fromkeys(waiting, HOST)}
    return replace(plan, block_changes=job.request.block_changes, side_models=moves, notes=notes)


def decide_again(job: TrainingJob, limits: Limits, plan: TrainingPlan) -> TrainingPlan:
    """The plan of a run that has begun with `plan`, for a job whose samples or checkpoints are others than that plan
    was made for: what cannot change any more stays, and what backward keeps is chosen anew.

    Raises:
        PlacementInvalid: the step does not fit so.
    """
    pinned = replace(
        job.request,
        strategy=plan.strategy,
        streamed_blocks=plan.streamed_blocks or None,
        chunks=(plan.step.chunk if plan.step is not None else None,),
        block_changes=plan.block_changes,
    )
    waiting = [name for name in _idle(job) if plan.side_models.get(name) == HOST]
    again = _decide(replace(job, request=pinned), limits, _idle(job), waiting)
    again = replace(again, saves_state=plan.saves_state)
    fixed = {"step": None}
    if plan.streamed_blocks != again.streamed_blocks or again.shared | fixed != plan.shared | fixed:
        raise PlacementInvalid("other blocks or side models would have to leave the device")
    if not fits(again.peaks, limits.available):
        raise PlacementInvalid("; ".join(map(str, again.peaks)))
    return again


def _plan(job: TrainingJob, limits: Limits) -> TrainingPlan:
    wanted = job.request.strategy
    if wanted is Strategy.SEQUENCE:
        if reason := why_not(wanted, job, fits=True):
            raise PlacementInvalid(f"plan {wanted.value}: {reason}", hint=job.advice("choose"))
    elif job.split_points is not None:
        return _over_stages(job, limits)
    if wanted is Strategy.RESIDENT:
        return _whole(job, limits, as_it_is=True)
    if wanted in PLANS:
        return PLANS[wanted](job, limits)
    if job.unpredictable:
        can_stream = not why_not(Strategy.STREAM, job, fits=True)
        note = "no plan is chosen without a predicted peak" + job.advice("name_a_strategy") * can_stream
        plan = _whole(job, limits)
        return replace(plan, notes=(note, *plan.notes))
    plans = _plans_that_fit(job, limits)
    fitting = {strategy: strategy in plans for strategy in Strategy}

    def shortage() -> tuple[str, str]:
        """Nothing where ranks could share each sample: that needs less."""
        if not why_not(Strategy.SEQUENCE, job, fits=True):
            return "", ""
        return lack(job, limits, lambda job: any(_tried(plan, job, limits) for plan in (_whole, _streamed)))

    taken = choose(job, fitting, shortage)
    reason, alternatives = explain(taken, job, fitting)
    return replace(plans[taken], reason=reason, alternatives=alternatives)


def _plans_that_fit(job: TrainingJob, limits: Limits) -> dict[Strategy, TrainingPlan]:
    """The plans with a process on each device that fit the job, whichever it asks for."""
    free = replace(job, request=replace(job.request, streamed_blocks=None))
    found = {
        one: _tried(plan, free, limits) for one, plan in PLANS.items() if job.ranks > 1 or one is not Strategy.SEQUENCE
    }
    return {strategy: plan for strategy, plan in found.items() if plan is not None}


def _tried(
    make: Callable[[TrainingJob, Limits], TrainingPlan], job: TrainingJob, limits: Limits
) -> TrainingPlan | None:
    """The plan, or None if it does not fit."""
    with suppress(PlacementInvalid):
        return make(job, limits)
    return None


def _notes_on_kept_blocks(job: TrainingJob, limits: Limits, plan: TrainingPlan) -> tuple[str, ...]:
    """Notes on the blocks that are not kept: why, or what would leave room for more."""
    if job.request.keep_blocks is False:
        return ()
    hint = "" if limits.expandable_segments else job.advice("expandable_segments")
    gaps = (f"some memory is left to gaps between tensors{hint}",) if hint and limits.available else ()
    if plan.step is not None and any(plan.step.num_kept_blocks):
        return gaps if sum(plan.step.num_kept_blocks) < len(job.blocks) else ()
    reason = "blocks are streamed to make room" if plan.streamed_blocks else why_no_block_is_kept(job, plan.step)
    if job.request.keep_blocks is None:
        return () if reason else gaps
    return (f"no block is kept: {reason or 'there is no room'}",)


def _forecast(job: TrainingJob, peaks: tuple[DevicePeak, ...]) -> str:
    if job.video is None or not peaks:
        return f"peak not predicted: {job.unpredictable}"
    return f"predicted peak for {job.video.tokens} tokens: " + "; ".join(map(str, peaks))


# With a process on each device


def _whole(job: TrainingJob, limits: Limits, *, as_it_is: bool = False) -> TrainingPlan:
    """The whole model on the first device, without further chunks, which change bits.

    Args:
        as_it_is: with chunks too, and whether it is predicted to fit or not.

    Raises:
        PlacementInvalid: it does not fit.
    """
    if not as_it_is:
        job = replace(job, request=replace(job.request, chunks=job.request.chunks[:1]))
    way, is_fitting = first_that_fits(job, limits, candidates(job, limits, Strategy.RESIDENT))
    if not (is_fitting or as_it_is):
        raise PlacementInvalid("the whole model does not fit")
    way = with_kept_blocks(job, way, limits)
    peaks = way.peaks
    note = f"predicted peak: {peaks[0]}" if peaks else f"peak not predicted: {job.unpredictable}"
    return TrainingPlan(strategy=Strategy.RESIDENT, devices=job.devices, step=way.settings, peaks=peaks, notes=(note,))


def _streamed(job: TrainingJob, limits: Limits) -> TrainingPlan:
    """The whole model on the first device with frozen weights streamed.

    Raises:
        PlacementInvalid: nothing fits, or nothing can be streamed.
    """
    if reason := job.excluded.get(Strategy.STREAM):
        raise PlacementInvalid(reason, expected="a frozen base of plain tensors with trainable adapters")
    way, _ = first_that_fits(job, limits, candidates(job, limits, Strategy.STREAM))
    device, blocks = job.devices[0], way.streamed
    beside = way.bytes_beside(job) if way.step is not None else 0
    if blocks is None:
        raise PlacementInvalid(
            f"this training step does not fit {device} with its frozen weights streamed: besides them it needs "
            f"{format_bytes(beside)}",
            expected=f"at most {format_bytes(limits.available[device])}",
            hint="Use fewer frames, or a split over several GPUs",
        )
    notes: tuple[str, ...] = ()
    if way.step is None:
        notes = (f"peak not predicted: {job.unpredictable}",)
    elif device in limits.available:
        needed = format_bytes(beside + blocks.device_bytes)
        notes = (f"predicted peak with {len(blocks.streamed)} blocks streamed: {needed}",)
    return TrainingPlan(
        strategy=Strategy.STREAM,
        devices=job.devices,
        step=way.settings,
        streamed_blocks=len(blocks.streamed),
        notes=notes,
    )


def _over_ranks(job: TrainingJob, limits: Limits) -> TrainingPlan:
    """Each sample over the ranks of a group, every rank with the whole model; its blocks are streamed if it does not
    fit. Exchanges run on a stream of their own, so that the allocator leaves gaps.

    Raises:
        PlacementInvalid: nothing fits.
    """
    ranks, groups, expandable = job.ranks, job.processes // job.ranks, limits.expandable_segments
    if not expandable:
        limits = replace(limits, available=without_gaps(limits.available), expandable_segments=True)
    share, limits, moves, notes = _without_side_models(on_each_rank(job), limits, Strategy.RESIDENT)
    plan = None if share.request.streamed_blocks else _tried(_whole, share, limits)
    if plan is not None:
        notes += (_forecast(job, plan.peaks),)
    else:
        plan = _streamed(share, limits)
        if not expandable and (hint := job.advice("expandable_segments")):
            notes += (f"blocks are streamed because the whole model does not fit{hint}",)
        notes += plan.notes
    outcome = f"the tokens of each sample over {ranks} GPUs, at most {ranks:.2f}x of one GPU's speed"
    outcome += f"; {groups} groups, each as one process of data parallel" if groups > 1 else ""
    return replace(plan, strategy=Strategy.SEQUENCE, ranks=ranks, side_models=moves, notes=notes, outcome=outcome)


PLANS = {Strategy.RESIDENT: _whole, Strategy.STREAM: _streamed, Strategy.SEQUENCE: _over_ranks}


def on_each_rank(job: TrainingJob) -> TrainingJob:
    """The job as each rank of a sequence group has it: on one device, with its share of the tokens.

    A rank computes on its share, keeps the first block's input whole, and exchanges at attention what it holds anyway.
    """

    def micro_batch(tokens: int, chunk: int | None) -> MicroBatch:
        share = job.micro_batch(-(-tokens // job.ranks), chunk)
        return replace(share, shared=share.shared + (job.ranks - 1) * share.activation)

    return replace(job, devices=job.devices[:1], split_points=None, micro_batch=micro_batch)


# Over the stages of a split model


def _over_stages(job: TrainingJob, limits: Limits) -> TrainingPlan:
    """Micro-batches in a pipeline over the stages, or one at a time if that is asked for or nothing else fits.

    Raises:
        PlacementInvalid: nothing fits.
    """
    reason = why_not(Strategy.PIPELINE, job, fits=True)
    if job.request.strategy is Strategy.SPLIT:
        reason = job.advice("requested", Strategy.SPLIT.value) or "it was asked for"
    wanted = 1 if reason else job.accumulation
    job, limits, moves, notes = _without_side_models(job, limits, Strategy.SPLIT, wanted)
    way, _ = first_that_fits(job, limits, candidates(job, limits, Strategy.SPLIT, wanted))
    check_fit(job, way, limits, lambda: job.ranks > 1 and _tried(_over_ranks, job, limits) is not None)
    way = with_kept_blocks(job, way, limits)
    if way.settings.in_flight < wanted:
        reason = "several in flight would not fit, one does"
        reason += "" if limits.expandable_segments else job.advice("expandable_segments")
    taken = Strategy.SPLIT if reason else Strategy.PIPELINE
    text, others = "", tuple[Alternative, ...]()
    if job.processes == 1 and not job.unpredictable:
        fitting = dict.fromkeys(_plans_that_fit(job, limits), True)
        fitting |= {Strategy.SPLIT: True, Strategy.PIPELINE: taken is Strategy.PIPELINE}
        asked = replace(job.request, strategy=job.request.strategy and taken)
        text, others = explain(taken, replace(job, request=asked), fitting)
    if reason:
        rejected = Alternative(strategy=Strategy.PIPELINE, gain=None, reason=reason)
        others = (*(one for one in others if one.strategy is not Strategy.PIPELINE), rejected)
        outcome = f"one micro-batch at a time: {reason}; the split gives room, not speed"
    else:
        stages, count = len(job.devices), job.accumulation
        outcome = f"{count} micro-batches in a pipeline of {stages} stages: "
        outcome += f"at most {pipeline_bound(stages, count):.2f}x of one GPU's speed"
    return TrainingPlan(
        strategy=taken,
        devices=job.devices,
        split_points=job.split_points or (),
        step=way.settings,
        side_models=moves,
        peaks=way.peaks,
        reason=text,
        alternatives=others,
        notes=(*notes, _forecast(job, way.peaks)),
        outcome=outcome,
    )


def _without_side_models(
    job: TrainingJob, limits: Limits, strategy: Strategy, in_flight: int = 1
) -> tuple[TrainingJob, Limits, Mapping[str, str], tuple[str, ...]]:
    """Job and limits once the side models have left the first device that the step would not fit beside; where each
    goes, and what is said of it. Nothing leaves so that attention can be kept, unless that was asked for."""
    sizes = {name: model.num_bytes for name, model in job.side_models.items() if model.movable}
    step = next(candidates(job, limits, strategy, in_flight)).step
    moves: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    if sizes and limits.available and step is not None:
        home = job.devices[0]
        alone = replace(step, home=replace(step.home, frozen=step.home.frozen - sum(sizes.values())))
        peaks = predict(alone if job.request.keep else replace(alone, keep=None))
        # with one micro-batch at a time they are called while no activation is kept
        calling = peaks[0].weights + peaks[0].gradients_and_optimizer if in_flight == 1 else peaks[0].total
        totals = by_device(peaks)
        moves = choose_devices(sizes, totals, limits.available, home, calling)
        notes = tuple(describe_move(name, moves, sizes, totals, limits.available, home) for name in moves)
    moved = Counter(job.moved)
    for name, device in moves.items():
        moved[device] += sizes[name]
    job = replace(
        job,
        home=replace(job.home, frozen=job.home.frozen - sum(sizes[name] for name in moves)),
        side_models={name: model for name, model in job.side_models.items() if name not in moves},
    )
    left = {device: count - moved[device] for device, count in limits.available.items()}
    return job, replace(limits, available=left), moves, notes
