"""How a step is run so that it fits, and what the user could change where none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from wanshim.core.model_split.plan import format_bytes
from wanshim.core.strategy.job import Limits, TrainingJob
from wanshim.core.strategy.limits import by_device, comparison, fits, within
from wanshim.core.strategy.predict import DevicePeak, KeptOn, MicroBatch, Step, predict, usable
from wanshim.errors import PlacementInvalid
from wanshim.values import Strategy

CHUNK_TOKENS = 2048  # products of this many rows keep a GPU busy; fewer save nothing, attention is what peaks then
HOST_SHARE = 0.5  # of host memory, taken without being asked: the rest is left to weights, loader workers and files
# What a user could change to make a step fit; a framework gives words for those it offers.
CHANGES = (
    "chunks",
    "split_points",
    "offload",
    "keep_off",
    "without_side_models",
    "low_precision",
    "low_precision_and_offload",
    "fewer_frames",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How steps are run.

    Args:
        chunk: tokens of a chunk; None: no chunks.
        offload: checkpoints wait in host memory.
        in_flight: micro-batches that overlap.
        offload_asked: the user asked for it.
        offload_for_attention: it lets attention be kept; where neither, the step would not fit without.
        keep: where self-attention's outputs are kept for recomputation; None: they are computed again.
        num_kept_blocks: of each stage, how many of its last blocks are not computed again; empty: all are.
    """

    chunk: int | None
    offload: bool
    in_flight: int
    offload_asked: bool = False
    offload_for_attention: bool = False
    keep: KeptOn | None = None
    num_kept_blocks: tuple[int, ...] = ()


def candidates(
    job: TrainingJob, devices: tuple[str, ...], points: tuple[int, ...], in_flight: int, host: int
) -> Iterator[tuple[StepSettings, Step | None]]:
    """Settings in the order of preference, each with the step they give: what changes no bit comes before what does.

    Where nothing can be predicted there is one, with None.

    Args:
        host: bytes of host memory for this process.
    """
    asked = bool(job.request.offload)
    if job.unpredictable:
        chunk = job.request.chunks[0] if job.chunkable else None
        keep = KeptOn.DEVICE if job.checkpointing and job.request.keep else None
        yield StepSettings(chunk=chunk, offload=asked, in_flight=in_flight, offload_asked=asked, keep=keep), None
        return
    for settings in _settings(job, asked, in_flight):
        for keep in _places_of_attention(job, settings, host):
            kept = replace(settings, keep=keep)
            yield kept, _step(job, kept, devices, points)


def _settings(job: TrainingJob, asked: bool, in_flight: int) -> Iterator[StepSettings]:
    may_offload = job.checkpointing and job.request.offload is not False
    named = job.request.strategy is Strategy.PIPELINE
    for chunk in job.request.chunks:
        yield StepSettings(chunk=chunk, offload=asked, in_flight=in_flight, offload_asked=asked)
        if may_offload and not asked:
            yield StepSettings(chunk=chunk, offload=True, in_flight=in_flight)
        if in_flight > 1 and not named:
            yield StepSettings(chunk=chunk, offload=may_offload, in_flight=1, offload_asked=asked)


def _places_of_attention(job: TrainingJob, settings: StepSettings, host: int) -> Iterator[KeptOn | None]:
    asked = job.request.keep
    if job.checkpointing and asked is not False:
        yield KeptOn.DEVICE
        there = replace(settings, keep=KeptOn.HOST)
        if asked or job.request.offload or (settings.offload and _has_room(job, there, host)):
            yield KeptOn.HOST
    if not (job.checkpointing and asked):
        yield None


def _has_room(job: TrainingJob, settings: StepSettings, host: int) -> bool:
    """Whether checkpoints, and attention's outputs if they are kept there, may wait in host memory unasked."""
    assert job.video is not None  # or nothing had been predicted
    one = job.micro_batch(job.video.tokens, settings.chunk)
    each = one.activation + (one.attention if settings.keep is KeptOn.HOST else 0)
    return settings.in_flight * len(job.blocks) * each <= HOST_SHARE * host


def _step(job: TrainingJob, settings: StepSettings, devices: tuple[str, ...], points: tuple[int, ...]) -> Step:
    assert job.video is not None  # or nothing had been predicted
    return Step(
        blocks=job.blocks,
        home=job.home,
        devices=devices,
        points=points,
        micro_batch=job.micro_batch(job.video.tokens, settings.chunk),
        in_flight=settings.in_flight,
        checkpointing=job.checkpointing,
        offloading=settings.offload or job.offloads_itself,
        processes=job.processes,
        keep=settings.keep,
        num_kept_blocks=settings.num_kept_blocks,
    )


def on_each_rank(job: TrainingJob) -> TrainingJob:
    """The job as each rank of a sequence group has it: on one device, with its share of the tokens.

    The first block's checkpoint holds all tokens, whatever the number of ranks.
    """

    def micro_batch(tokens: int, chunk: int | None) -> MicroBatch:
        share = job.micro_batch(-(-tokens // job.ranks), chunk)
        return replace(share, shared=share.shared + (job.ranks - 1) * share.activation)

    return replace(job, devices=job.devices[:1], split_points=None, micro_batch=micro_batch)


def first_that_fits(
    ways: Iterator[tuple[StepSettings, Step | None]], limits: Limits
) -> tuple[StepSettings, Step | None]:
    """The first settings that fit, else the last."""
    way = next(ways)  # there is one at least
    while way[1] is not None and not fits(
        predict(way[1]), usable(way[1], limits.available, expandable_segments=limits.expandable_segments)
    ):
        following = next(ways, None)
        if following is None:
            break
        way = following
    return way


def first_that_keeps_attention(
    job: TrainingJob, ways: Sequence[tuple[StepSettings, Step | None]], limits: Limits
) -> tuple[StepSettings, Step | None]:
    """The first settings that fit, else the last; but rather than attention is computed again, checkpoints wait in host
    memory, and attention beside them if need be, where half of it holds that.

    Measured on one H200 within 48 GiB (benchmarks/results/sequence_training_480p_48GiB_*.json): 6.05 s a step with
    checkpoints there, 6.67 s with attention computed again and a block kept in the room that was left. Several
    processes of a host share its memory and links, which has not been measured.
    """
    way = first_that_fits(iter(ways), limits)
    chosen, predicted = way
    if predicted is None or chosen.offload or chosen.keep is not None or job.local_processes > 1:
        return way
    for settings, step in ways:
        if settings.chunk != chosen.chunk or not settings.offload or settings.keep is None or step is None:
            continue
        if _has_room(job, settings, limits.host) and fits(predict(step), limits.available):
            return replace(settings, offload_for_attention=True), step
    return way


def with_kept_blocks(job: TrainingJob, settings: StepSettings, step: Step, limits: Limits) -> tuple[StepSettings, Step]:
    """The same with as many of each stage's last blocks kept as the devices have room for, if that is allowed."""
    if why_no_block_is_kept(job, settings):
        return settings, step
    bounds = (0, *step.points, len(step.blocks))
    step = replace(step, num_kept_blocks=(0,) * len(step.devices))
    for stage, (device, (first, last)) in enumerate(zip(step.devices, pairwise(bounds), strict=True)):
        if job.request.keep_blocks is None and device not in limits.available:
            continue
        for count in range(last - first, 0, -1):
            kept = replace(
                step, num_kept_blocks=(*step.num_kept_blocks[:stage], count, *step.num_kept_blocks[stage + 1 :])
            )
            room = usable(kept, limits.available, expandable_segments=limits.expandable_segments)
            if within({device: by_device(predict(kept))[device]}, room):
                step = kept
                break
    if not any(step.num_kept_blocks):
        step = replace(step, num_kept_blocks=())
    elif sum(step.num_kept_blocks) == len(step.blocks):
        step = replace(step, keep=None)  # no block is left whose attention would be computed again
    return replace(settings, num_kept_blocks=step.num_kept_blocks, keep=step.keep), step


def why_no_block_is_kept(job: TrainingJob, settings: StepSettings | None) -> str:
    """Why each block is computed again in backward however much room there is, or nothing."""
    if job.request.keep_blocks is False:
        return "it was not asked for"
    if not job.checkpointing:
        return "gradient checkpointing is off, so that every block is kept"
    if settings is None or job.unpredictable:
        return "the peak is not predicted"
    if settings.offload or job.offloads_itself:
        return "checkpoints wait in host memory"
    return ""


def notes_on_kept_blocks(
    job: TrainingJob, limits: Limits, settings: StepSettings | None, *, streamed: bool
) -> tuple[str, ...]:
    """What a user should know of the blocks that are not kept: why, or what would leave room for more."""
    if job.request.keep_blocks is False:
        return ()
    hint = "" if limits.expandable_segments else job.advice("expandable_segments")
    gaps = (f"some memory is left to gaps between tensors{hint}",) if hint and limits.available else ()
    if settings is not None and any(settings.num_kept_blocks):
        return gaps if sum(settings.num_kept_blocks) < len(job.blocks) else ()
    reason = "blocks are streamed to make room" if streamed else why_no_block_is_kept(job, settings)
    if job.request.keep_blocks is None:
        return () if reason else gaps
    return (f"no block is kept: {reason or 'there is no room'}",)


def check_fit(
    job: TrainingJob,
    settings: StepSettings,
    step: Step,
    limits: Limits,
    fits_over_ranks: Callable[[], bool] = lambda: False,
) -> None:
    """Refuse a step that does not fit.

    Args:
        fits_over_ranks: whether sequence parallel would fit; asked only where the step does not.

    Raises:
        PlacementInvalid: it does not fit; with predicted and available bytes of each device, and those changes that
            would make it fit by the same prediction.
    """
    peaks, available = predict(step), limits.available
    if fits(peaks, available):
        return
    ways = [
        f"{change} ({_totals(predict(other))})"
        for change, other in _changes(job, settings, step, available)
        if change and fits(predict(other), available)
    ]
    if (change := job.advice("sequence", job.num_gpus)) and fits_over_ranks():
        ways.append(change)
    raise PlacementInvalid(
        "this training step does not fit: " + comparison(by_device(peaks), available),
        expected="a predicted peak within each device's memory: " + "; ".join(map(str, peaks)),
        hint=f"What would fit: {'; '.join(ways)}" if ways else "None of the known changes alone would make it fit",
    )


def _changes(
    job: TrainingJob, settings: StepSettings, step: Step, available: Mapping[str, int]
) -> Iterator[tuple[str, Step]]:
    """What the user could change, one thing at a time and then two, each with the step it gives."""
    assert job.video is not None  # or nothing had been predicted
    low = step.with_frozen_halved()
    if settings.chunk is None:
        yield job.advice("chunks"), replace(step, micro_batch=job.micro_batch(job.video.tokens, CHUNK_TOKENS))
    points = split_points_that_fit(step, available)
    if points is not None:
        yield job.advice("split_points", ",".join(map(str, points))), replace(step, points=points)
    if step.checkpointing and not step.offloading:
        yield job.advice("offload"), replace(step, offloading=True, in_flight=1)
    if step.keep is not None:
        yield job.advice("keep_off"), replace(step, keep=None)
    beside = sum(model.num_bytes for model in job.side_models.values())
    if beside:
        alone = replace(step, home=replace(step.home, frozen=step.home.frozen - beside))
        yield job.advice("without_side_models"), alone
    yield job.advice("low_precision"), low
    if step.checkpointing and not step.offloading:
        yield job.advice("low_precision_and_offload"), replace(low, offloading=True)
    for frames in range(job.video.frames - 1, 0, -1):
        tokens = frames * job.video.tokens_per_frame
        less = replace(step, micro_batch=job.micro_batch(tokens, settings.chunk))
        if fits(predict(less), available):
            yield job.advice("fewer_frames", job.video.length_of(frames)), less
            return


def split_points_that_fit(step: Step, available: Mapping[str, int]) -> tuple[int, ...] | None:
    """Split points that leave every device most memory, if any fit; three stages at most are tried."""
    limited = [device for device in step.devices if device in available]
    if not 1 < len(step.devices) <= 3 or not limited:
        return None
    tried = [replace(step, points=points) for points in combinations(range(1, len(step.blocks)), len(step.devices) - 1)]

    def least_left(one: Step) -> int:
        return min(available[peak.device] - peak.total for peak in predict(one) if peak.device in available)

    best = max(tried, key=least_left)
    return best.points if fits(predict(best), available) else None


def _totals(peaks: tuple[DevicePeak, ...]) -> str:
    return ", ".join(f"{peak.device} {format_bytes(peak.total)}" for peak in peaks)
