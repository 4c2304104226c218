"""The candidates of a strategy: every way to run a step of a job, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from wanshim.core.strategy.job import Limits, TrainingJob
from wanshim.core.strategy.limits import by_device, fits, usable, within
from wanshim.core.strategy.predict import DevicePeak, KeptOn, MicroBatch, Step, predict
from wanshim.core.streaming.plan import SLOTS, StreamPlan, plan_stream
from wanshim.errors import PlacementInvalid
from wanshim.values import Strategy

CHUNK_TOKENS = 2048  # products of this many rows keep a GPU busy; fewer save nothing, attention is what peaks then
HOST_SHARE = 0.5  # of host memory, taken without being asked: the rest is left to weights, loader workers and files
OVER_STAGES = (Strategy.PIPELINE, Strategy.SPLIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of the steps.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to run the steps of a job.

    Args:
        step: what its peak is predicted from; None: it cannot be predicted.
        streamed: the blocks that wait in host memory, once it is known how many have to.
    """

    strategy: Strategy
    settings: StepSettings
    step: Step | None
    streamed: StreamPlan | None = None

    @property
    def peaks(self) -> tuple[DevicePeak, ...]:
        return predict(self.step) if self.step is not None else ()

    def bytes_beside(self, job: TrainingJob) -> int:
        """Bytes that the first device needs besides the weights of the trained model."""
        return self.peaks[0].total - job.model_bytes

    def fits(self, limits: Limits) -> bool:
        """Whether it fits with the whole model on its devices."""
        return self.step is None or fits(self.peaks, usable(self.step, limits))


def candidates(job: TrainingJob, limits: Limits, strategy: Strategy, in_flight: int = 1) -> Iterator[Candidate]:
    """The candidates of a strategy, in order; one where nothing can be predicted. Chunks change bits: whatever runs
    without them comes first."""
    asked, over_stages = bool(job.request.offload), strategy in OVER_STAGES
    if job.unpredictable:
        chunk = job.request.chunks[0] if job.chunkable else None
        keep = KeptOn.DEVICE if job.checkpointing and job.request.keep else None
        settings = StepSettings(chunk=chunk, offload=asked, in_flight=in_flight, offload_asked=asked, keep=keep)
        yield Candidate(strategy=strategy, settings=settings, step=None)
        return
    assert job.video is not None  # or nothing could be predicted
    for chunk in job.request.chunks:
        step = Step(
            blocks=job.blocks,
            home=job.home,
            devices=job.devices if over_stages else job.devices[:1],
            points=job.split_points or () if over_stages else (),
            micro_batch=job.micro_batch(job.video.tokens, chunk),
            checkpointing=job.checkpointing,
            processes=job.processes,
        )
        ways = _settings(job, limits, strategy, step.micro_batch, chunk, in_flight)
        for _, settings in sorted(ways, key=lambda way: way[0]):
            offloading = settings.offload or job.offloads_itself
            changed = replace(step, in_flight=settings.in_flight, offloading=offloading, keep=settings.keep)
            yield Candidate(strategy=strategy, settings=settings, step=changed)


def _settings(
    job: TrainingJob, limits: Limits, strategy: Strategy, one: MicroBatch, chunk: int | None, in_flight: int
) -> Iterator[tuple[tuple[bool, ...], StepSettings]]:
    """All settings with this chunk, each with its place in the order.

    Host memory is taken rather than that attention is computed again: measured on one H200 within 48 GiB
    (benchmarks/results/sequence_training_480p_48GiB_*.json), 6.05 s a step with checkpoints there, 6.67 s with
    attention computed again and a block kept in the room that was left; within 16 GiB, with blocks streamed, 6.06 s and
    6.78 s. Several processes of a host share its memory and links, which has not been measured: there, checkpoints
    leave the device only if the step does not fit otherwise.
    """
    asked, keep = job.request.offload, job.request.keep
    alone = strategy is Strategy.RESIDENT and job.local_processes == 1
    streams = strategy is Strategy.STREAM and keep is None
    # on the device, attention would take the room of blocks, which then had to be streamed
    fills_device = streams and job.request.streamed_blocks is None and job.devices[0] in limits.available
    may_offload = job.checkpointing and asked is not False
    ways = {(bool(asked), in_flight): None, (bool(asked) or may_offload, in_flight): None}
    if in_flight > 1 and job.request.strategy is not Strategy.PIPELINE:
        ways[may_offload, 1] = None
    for offload, count in ways:
        copies = count * len(job.blocks)
        room = HOST_SHARE * limits.host - copies * one.activation  # in host memory, beside checkpoints
        room_for_attention = room >= copies * one.attention
        places: list[KeptOn | None] = []
        if job.checkpointing and keep is not False:
            places += [KeptOn.DEVICE] * (not fills_device)
            places += [KeptOn.HOST] * bool(keep or asked or (offload and room_for_attention))
        for place in (*places, *([None] if not (job.checkpointing and keep) else [])):
            if streams:
                only_to_fit = offload and place is not KeptOn.HOST
            else:
                has_room = alone and (room_for_attention if place is KeptOn.HOST else room >= 0)
                only_to_fit = offload and not asked and not has_room
            order = (count < in_flight, only_to_fit, place is None, offload, place is KeptOn.HOST)
            yield (
                order,
                StepSettings(chunk=chunk, offload=offload, in_flight=count, offload_asked=bool(asked), keep=place),
            )


def first_that_fits(job: TrainingJob, limits: Limits, ways: Iterable[Candidate]) -> tuple[Candidate, bool]:
    """The first candidate that fits, of those that stream with its blocks, else the last; and whether it fits."""
    for way in ways:
        if way.strategy is Strategy.STREAM:
            if (streamed := _with_streamed_blocks(job, limits, way)) is not None:
                return streamed, True
        elif way.fits(limits):
            return _with_reason_to_offload(job, limits, way), True
    return way, False  # there is one at least


def _with_reason_to_offload(job: TrainingJob, limits: Limits, way: Candidate) -> Candidate:
    """The same, which says whether its checkpoints are offloaded so that attention can be kept."""
    settings = way.settings
    if way.step is None or not settings.offload or settings.offload_asked or settings.keep is None:
        return way
    without = replace(way, step=replace(way.step, offloading=job.offloads_itself, keep=None))
    for_attention = way.strategy is Strategy.RESIDENT and not job.request.keep and without.fits(limits)
    return replace(way, settings=replace(settings, offload_for_attention=for_attention))


def _with_streamed_blocks(job: TrainingJob, limits: Limits, way: Candidate) -> Candidate | None:
    """The same with the blocks streamed that were asked for, else as few as fit; None: it does not fit.

    Raises:
        PlacementInvalid: the model has not as many blocks as were asked for.
    """
    count, settings = job.request.streamed_blocks, way.settings
    for_attention = settings.offload and not settings.offload_asked and settings.keep is KeptOn.HOST
    budget = None
    if way.step is not None and job.devices[0] in limits.available:
        budget = limits.available[job.devices[0]] - way.bytes_beside(job)
    try:
        blocks = blocks_to_stream(job, count, None if count else budget)
    except PlacementInvalid:
        if count is not None or budget is None:
            raise
        return None
    if budget is not None and blocks.device_bytes > budget:
        return None
    return replace(way, settings=replace(settings, offload_for_attention=for_attention), streamed=blocks)


def blocks_to_stream(job: TrainingJob, count: int | None, budget: int | None) -> StreamPlan:
    """See `plan_stream`."""
    rest = job.model_bytes - sum(job.streamable)
    return plan_stream(job.streamable, rest, job.devices[0], count=count, budget=budget, slots=SLOTS)


def with_kept_blocks(job: TrainingJob, way: Candidate, limits: Limits) -> Candidate:
    """The same with as many of each stage's last blocks kept as the devices have room for, if that is allowed."""
    step = way.step
    if step is None or why_no_block_is_kept(job, way.settings):
        return way
    bounds = (0, *step.points, len(step.blocks))
    step = replace(step, num_kept_blocks=(0,) * len(step.devices))
    for stage, (device, (first, last)) in enumerate(zip(step.devices, pairwise(bounds), strict=True)):
        if job.request.keep_blocks is None and device not in limits.available:
            continue
        for count in range(last - first, 0, -1):
            counts = (*step.num_kept_blocks[:stage], count, *step.num_kept_blocks[stage + 1 :])
            kept = replace(step, num_kept_blocks=counts)
            if within({device: by_device(predict(kept))[device]}, usable(kept, limits)):
                step = kept
                break
    if not any(step.num_kept_blocks):
        step = replace(step, num_kept_blocks=())
    elif sum(step.num_kept_blocks) == len(step.blocks):
        step = replace(step, keep=None)  # no block is left whose attention would be computed again
    settings = replace(way.settings, num_kept_blocks=step.num_kept_blocks, keep=step.keep)
    return replace(way, settings=settings, step=step)


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
