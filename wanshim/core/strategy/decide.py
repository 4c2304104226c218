"""How a training job runs: decided from the job and the machine's limits alone. No device is touched here, and nothing
changes.

A new strategy is a member of `Strategy`, its bound and its reasons in `choice.py`, and a branch here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby

from wanshim.core.model_split.plan import format_bytes
from wanshim.core.model_split.side_models import choose_devices, describe_move
from wanshim.core.pipeline.schedule import pipeline_bound
from wanshim.core.strategy.choice import Fits, choose, explain, why_not
from wanshim.core.strategy.fit import (
    StepSettings,
    candidates,
    check_fit,
    first_that_fits,
    first_that_keeps_attention,
    notes_on_kept_blocks,
    on_each_rank,
    with_kept_blocks,
)
from wanshim.core.strategy.job import Limits, TrainingJob
from wanshim.core.strategy.limits import fits
from wanshim.core.strategy.plan import Alternative, TrainingPlan
from wanshim.core.strategy.predict import DevicePeak, KeptOn, Step, predict, without_gaps
from wanshim.core.streaming.plan import SLOTS, StreamPlan, plan_stream
from wanshim.errors import PlacementInvalid
from wanshim.values import Strategy


def decide(job: TrainingJob, limits: Limits) -> TrainingPlan:
    """The plan for a job, with every strategy that was not taken and the reason.

    Raises:
        PlacementInvalid: no step fits, with what would; or the requested strategy cannot run.
    """
    assumed = (job.sizes,) if job.sizes and not job.unpredictable else ()
    try:
        plan = replace(_decide(job, limits), block_changes=job.request.block_changes)
    except PlacementInvalid as error:
        error.found = "; ".join((error.found, *assumed))
        raise
    kept = notes_on_kept_blocks(job, limits, plan.step, streamed=bool(plan.streamed_blocks))
    return replace(plan, notes=(*plan.notes, *kept, *assumed))


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
    again = replace(decide(replace(job, request=pinned), limits), saves_state=plan.saves_state)
    fixed = {"step": None}
    if plan.streamed_blocks != again.streamed_blocks or again.shared | fixed != plan.shared | fixed:
        raise PlacementInvalid("other blocks or side models would have to leave the device")
    if not fits(again.peaks, limits.available):
        raise PlacementInvalid("; ".join(map(str, again.peaks)))
    return again


def _decide(job: TrainingJob, limits: Limits) -> TrainingPlan:
    if job.request.strategy is Strategy.SEQUENCE:
        return _over_ranks(job, limits)
    if job.split_points is not None:
        return _over_stages(job, limits, job.split_points)
    if job.request.strategy is Strategy.STREAM:
        return _streamed(job, limits)
    if job.request.strategy is Strategy.RESIDENT:
        return _as_it_is(job, limits)
    return _on_one_device(job, limits)


# Over the stages of a split model


def _over_stages(job: TrainingJob, limits: Limits, points: tuple[int, ...]) -> TrainingPlan:
    reason = _no_overlap(job)
    wanted = 1 if reason else job.accumulation
    moves, notes = _side_models(job, limits, points, wanted)
    job, limits = _without_moved_models(moves, job, limits)
    step, predicted = first_that_fits(candidates(job, job.devices, points, wanted, limits.host), limits)
    peaks: tuple[DevicePeak, ...] = ()
    if predicted is None:
        notes += (f"peak not predicted: {job.unpredictable}",)
    else:
        assert job.video is not None
        check_fit(job, step, predicted, limits, partial(_fits_over_ranks, job, limits))
        step, predicted = with_kept_blocks(job, step, predicted, limits)
        peaks = predict(predicted)
        notes += (f"predicted peak for {job.video.tokens} tokens: " + "; ".join(map(str, peaks)),)
    if step.in_flight < wanted:
        reason = "several in flight would not fit, one does"
        reason += "" if limits.expandable_segments else job.advice("expandable_segments")
    taken = Strategy.SPLIT if reason else Strategy.PIPELINE
    text, others = "", tuple[Alternative, ...]()
    if job.processes == 1 and not job.unpredictable:
        said_of = replace(job, request=replace(job.request, strategy=job.request.strategy and taken))
        text, others = explain(taken, said_of, _fits(job, limits, taken))
    return TrainingPlan(
        strategy=taken,
        devices=job.devices,
        split_points=points,
        step=step,
        side_models=moves,
        peaks=peaks,
        reason=text,
        alternatives=_with_reason(reason, others),
        notes=notes,
        outcome=_outcome(job, len(points) + 1, reason),
    )


def _no_overlap(job: TrainingJob) -> str:
    """Why micro-batches do not overlap, or nothing."""
    if job.request.strategy is Strategy.SPLIT:
        return job.advice("requested", Strategy.SPLIT.value) or "it was asked for"
    return why_not(Strategy.PIPELINE, job, fits=True)


def _outcome(job: TrainingJob, num_stages: int, reason: str) -> str:
    if reason:
        return f"one micro-batch at a time: {reason}; the split gives room, not speed"
    bound = pipeline_bound(num_stages, job.accumulation)
    run = f"{job.accumulation} micro-batches in a pipeline of {num_stages} stages"
    return f"{run}: at most {bound:.2f}x of one GPU's speed"


def _with_reason(reason: str, others: tuple[Alternative, ...]) -> tuple[Alternative, ...]:
    """The alternatives, where the pipeline has the reason that was found here."""
    if not reason:
        return others
    rejected = Alternative(strategy=Strategy.PIPELINE, gain=None, reason=reason)
    return (*(one for one in others if one.strategy is not Strategy.PIPELINE), rejected)


def _side_models(
    job: TrainingJob, limits: Limits, points: tuple[int, ...], in_flight: int
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """The side models that leave the first device since the step would not fit beside them, and what is said of it."""
    sizes = {name: model.num_bytes for name, model in job.side_models.items() if model.movable}
    _, step = next(candidates(job, job.devices, points, in_flight, limits.host))
    if not sizes or not limits.available or step is None:
        return {}, ()
    if job.request.keep is None:  # nothing leaves so that attention can be kept
        step = replace(step, keep=None)
    alone = replace(step, home=replace(step.home, frozen=step.home.frozen - sum(sizes.values())))
    peaks = {peak.device: peak for peak in predict(alone)}
    home = job.devices[0]
    # with one micro-batch at a time they are called while no activation is kept
    calling = peaks[home].weights + peaks[home].gradients_and_optimizer if in_flight == 1 else peaks[home].total
    totals = {device: peak.total for device, peak in peaks.items()}
    moves = choose_devices(sizes, totals, limits.available, home, calling)
    return moves, tuple(describe_move(name, moves, sizes, totals, limits.available, home) for name in moves)


def _without_moved_models(moves: Mapping[str, str], job: TrainingJob, limits: Limits) -> tuple[TrainingJob, Limits]:
    """Job and limits as they are once these side models have left the first device, and others before them."""
    leaving = {name: job.side_models[name].num_bytes for name in moves}
    taken = dict(job.moved)
    for name, device in moves.items():
        taken[device] = taken.get(device, 0) + leaving[name]
    rest = replace(
        job,
        home=replace(job.home, frozen=job.home.frozen - sum(leaving.values())),
        side_models={name: model for name, model in job.side_models.items() if name not in moves},
    )
    left = {device: count - taken.get(device, 0) for device, count in limits.available.items()}
    return rest, replace(limits, available=left)


# On one device a process


def _on_one_device(job: TrainingJob, limits: Limits) -> TrainingPlan:
    """The whole model on the device if that fits, else with as few of its blocks streamed as fit."""
    if job.unpredictable:
        note = "no plan is chosen: this model or the size of its videos is not known" + job.advice("name_a_strategy")
        return replace(_as_it_is(job, limits), notes=(note, f"peak not predicted: {job.unpredictable}"))
    fitting = _fits(job, limits)
    taken = choose(job, fitting, partial(_shortage, job, limits))
    make = {Strategy.RESIDENT: _as_it_is, Strategy.STREAM: _streamed, Strategy.SEQUENCE: _over_ranks}[taken]
    text, others = explain(taken, job, fitting)
    return replace(make(job, limits), reason=text, alternatives=others)


def _shortage(job: TrainingJob, limits: Limits) -> tuple[str, str]:
    """What the leanest step needs on the device of this process, beside what that has; and the longest video that
    would fit, in the user's words, or nothing. Nothing where ranks could share each sample: that needs less."""
    if not why_not(Strategy.SEQUENCE, job, fits=True):
        return "", ""
    assert job.video is not None  # or nothing had been predicted
    device = job.devices[0]
    streams = Strategy.STREAM not in job.excluded and len(job.streamable) >= SLOTS
    chunks = job.request.chunks if streams else job.request.chunks[:1]  # see `_resident`
    ways = candidates(replace(job, request=replace(job.request, chunks=chunks)), (device,), (), 1, limits.host)
    least = min(predict(step)[0].total for _, step in ways if step is not None)
    how = " with every block streamed" if streams else ""
    if streams:
        least += _blocks_to_stream(job, len(job.streamable), None).device_bytes - job.model_bytes
    available = format_bytes(limits.available[device])
    lacks = f"at least {format_bytes(least)} are needed on {device}{how}, and {available} are available"

    def is_too_long(frames: int) -> bool:
        assert job.video is not None
        shorter = replace(job, video=replace(job.video, frames=frames))
        return not (_resident(shorter, limits) or _can_be_streamed(shorter, limits))

    frames = bisect_left(range(job.video.frames), True, lo=1, key=is_too_long) - 1
    return lacks, job.advice("fewer_frames", job.video.length_of(frames)) if frames else ""


def _as_it_is(job: TrainingJob, limits: Limits) -> TrainingPlan:
    """The whole model on the device, whether that is predicted to fit or not."""
    step, peaks = _first_with_kept_blocks(job, candidates(job, job.devices[:1], (), 1, limits.host), limits)
    note = f"predicted peak: {peaks[0]}" if peaks else f"peak not predicted: {job.unpredictable}"
    return TrainingPlan(strategy=Strategy.RESIDENT, devices=job.devices, step=step, peaks=peaks, notes=(note,))


def _resident(job: TrainingJob, limits: Limits) -> tuple[StepSettings, tuple[DevicePeak, ...]] | None:
    """How steps are run with the whole model on the first device, if they fit without further chunks, which change
    bits; with the peaks, as far as they can be predicted."""
    here = job.devices[:1]
    ways = list(candidates(job, here, (), 1, limits.host))
    unchanged = (way for way in ways if way[0].chunk == ways[0][0].chunk)
    step, peaks = _first_with_kept_blocks(job, unchanged, limits)
    return (step, peaks) if fits(peaks, limits.available) else None


def _first_with_kept_blocks(
    job: TrainingJob, ways: Iterator[tuple[StepSettings, Step | None]], limits: Limits
) -> tuple[StepSettings, tuple[DevicePeak, ...]]:
    """The chosen settings, the first that fit or the last, kept blocks included; their peaks, as far as predicted."""
    step, predicted = first_that_keeps_attention(job, tuple(ways), limits)
    if predicted is None:
        return step, ()
    step, predicted = with_kept_blocks(job, step, predicted, limits)
    return step, predict(predicted)


def _over_ranks(job: TrainingJob, limits: Limits) -> TrainingPlan:
    """Each sample over the ranks of a group, every rank with the whole model; its blocks are streamed if it does not
    fit.

    Raises:
        PlacementInvalid: it was launched in another way, or nothing fits.
    """
    if reason := why_not(Strategy.SEQUENCE, job, fits=True):
        raise PlacementInvalid(f"plan {Strategy.SEQUENCE.value}: {reason}", hint=job.advice("choose"))
    ranks, groups = job.ranks, job.processes // job.ranks
    share, rest, moves, notes = _of_a_rank(job, limits)
    found = None if share.request.streamed_blocks else _resident(share, rest)
    if found is None:
        plan = _streamed(share, rest)
        if not limits.expandable_segments and (hint := job.advice("expandable_segments")):
            notes += (f"blocks are streamed because the whole model does not fit{hint}",)
    else:
        step, peaks = found
        plan = TrainingPlan(strategy=Strategy.SEQUENCE, devices=share.devices, step=step, peaks=peaks)
        if job.unpredictable or job.video is None:
            notes += (f"peak not predicted: {job.unpredictable}",)
        else:
            notes += (f"predicted peak for {job.video.tokens} tokens: " + "; ".join(map(str, peaks)),)
    outcome = f"the tokens of each sample over {ranks} GPUs, at most {ranks:.2f}x of one GPU's speed"
    return replace(
        plan,
        strategy=Strategy.SEQUENCE,
        ranks=ranks,
        side_models=moves,
        notes=notes + plan.notes,
        outcome=outcome + (f"; {groups} groups, each as one process of data parallel" if groups > 1 else ""),
    )


def _of_a_rank(job: TrainingJob, limits: Limits) -> tuple[TrainingJob, Limits, Mapping[str, str], tuple[str, ...]]:
    """The job of one rank with what it has, once side models have left if the step would not fit beside them. Exchanges
    run on a stream of their own, so that the allocator leaves gaps."""
    share = on_each_rank(job)
    if not limits.expandable_segments:
        limits = replace(limits, available=without_gaps(limits.available), expandable_segments=True)
    moves, notes = _side_models(share, limits, (), 1)
    share, limits = _without_moved_models(moves, share, limits)
    return share, limits, moves, notes


def _streamed(job: TrainingJob, limits: Limits) -> TrainingPlan:
    """The whole model on the first device with frozen weights streamed.

    Raises:
        PlacementInvalid: nothing fits, or nothing can be streamed.
    """
    if reason := job.excluded.get(Strategy.STREAM):
        raise PlacementInvalid(reason, expected="a frozen base of plain tensors with trainable adapters")
    device, rest = job.devices[0], 0
    count, limit = job.request.streamed_blocks, limits.available.get(device)
    ways = candidates(job, (device,), (), 1, limits.host)
    if job.request.keep is None:
        ways = _by_preference_where_streamed(ways)
    for step, predicted in ways:
        if predicted is None or limit is None:
            note = (f"peak not predicted: {job.unpredictable}",) if predicted is None else ()
            return _stream_plan(job, step, _blocks_to_stream(job, count, None), notes=note)
        if job.request.keep is None and step.keep is KeptOn.DEVICE and count is None:
            continue  # it would take the room of blocks, which then had to be streamed
        (peak,) = predict(predicted)
        rest = peak.total - job.model_bytes
        try:
            blocks = _blocks_to_stream(job, count, None if count else limit - rest)
        except PlacementInvalid:
            if count is not None:
                raise
            continue
        if rest + blocks.device_bytes <= limit:
            needed = format_bytes(rest + blocks.device_bytes)
            note = (f"predicted peak with {len(blocks.streamed)} blocks streamed: {needed}",)
            return _stream_plan(job, step, blocks, notes=note)
    assert limit is not None  # or the first way had been taken
    raise PlacementInvalid(
        f"this training step does not fit {device} with its frozen weights streamed: besides them it needs "
        f"{format_bytes(rest)}",
        expected=f"at most {format_bytes(limit)}",
        hint="Use fewer frames, or a split over several GPUs",
    )


def _by_preference_where_streamed(
    ways: Iterator[tuple[StepSettings, Step | None]],
) -> Iterator[tuple[StepSettings, Step | None]]:
    """What changes no bit first; then attention kept in host memory before attention that is computed again: the link
    has time for it (measured on one H200: 6.06 s and 6.78 s a step within 16 GiB)."""

    def preference(way: tuple[StepSettings, Step | None]) -> int:
        on_device = way[0].keep is KeptOn.DEVICE and not way[0].offload
        return 0 if on_device else 1 if way[0].keep is KeptOn.HOST else 2

    for _, same_chunks in groupby(ways, key=lambda way: way[0].chunk):
        yield from sorted(same_chunks, key=preference)


def _blocks_to_stream(job: TrainingJob, count: int | None, budget: int | None) -> StreamPlan:
    rest = job.model_bytes - sum(job.streamable)
    return plan_stream(job.streamable, rest, job.devices[0], count=count, budget=budget, slots=SLOTS)


def _stream_plan(job: TrainingJob, step: StepSettings, blocks: StreamPlan, notes: tuple[str, ...]) -> TrainingPlan:
    for_attention = step.offload and not step.offload_asked and step.keep is KeptOn.HOST
    return TrainingPlan(
        strategy=Strategy.STREAM,
        devices=job.devices,
        step=replace(step, offload_for_attention=for_attention),
        streamed_blocks=len(blocks.streamed),
        notes=notes,
    )


# What fits


def _fits(job: TrainingJob, limits: Limits, over_stages: Strategy | None = None) -> Fits:
    """Whether each strategy fits; the one over the stages has been found to."""
    return {
        Strategy.RESIDENT: _resident(job, limits) is not None,
        Strategy.STREAM: _can_be_streamed(replace(job, request=replace(job.request, streamed_blocks=None)), limits),
        Strategy.SEQUENCE: _fits_over_ranks(job, limits),
        Strategy.PIPELINE: over_stages is Strategy.PIPELINE,
        Strategy.SPLIT: over_stages is not None,
    }


def _fits_over_ranks(job: TrainingJob, limits: Limits) -> bool:
    if job.ranks < 2:
        return False
    share, limits, *_ = _of_a_rank(job, limits)
    return _resident(share, limits) is not None or _can_be_streamed(share, limits)


def _can_be_streamed(job: TrainingJob, limits: Limits) -> bool:
    try:
        return bool(_streamed(job, limits).streamed_blocks)
    except PlacementInvalid:
        return False
