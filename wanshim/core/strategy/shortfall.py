"""The refusal of a step that does not fit: what it lacks, and what the user could change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from wanshim.core.model_split.plan import format_bytes
from wanshim.core.strategy.candidates import CHUNK_TOKENS, Candidate, blocks_to_stream, candidates
from wanshim.core.strategy.job import Limits, TrainingJob, Video
from wanshim.core.strategy.limits import by_device, comparison, fits
from wanshim.core.strategy.predict import Step, predict
from wanshim.core.streaming.plan import SLOTS
from wanshim.errors import PlacementInvalid
from wanshim.values import Strategy


def check_fit(
    job: TrainingJob, way: Candidate, limits: Limits, fits_over_ranks: Callable[[], bool] = lambda: False
) -> None:
    """Refuse a step that does not fit.

    Args:
        fits_over_ranks: whether sequence parallel would fit; asked only where the step does not.

    Raises:
        PlacementInvalid: it does not fit; with predicted and available bytes of each device, and those changes that
            would make it fit by the same prediction.
    """
    peaks, available = way.peaks, limits.available
    if fits(peaks, available):
        return
    ways = [
        f"{change} ({', '.join(f'{device} {format_bytes(size)}' for device, size in by_device(other).items())})"
        for change, step in _changes(job, way, available)
        if change and fits(other := predict(step), available)
    ]
    if (change := job.advice("sequence", job.num_gpus)) and fits_over_ranks():
        ways.append(change)
    raise PlacementInvalid(
        "this training step does not fit: " + comparison(by_device(peaks), available),
        expected="a predicted peak within each device's memory: " + "; ".join(map(str, peaks)),
        hint=f"What would fit: {'; '.join(ways)}" if ways else "None of the known changes alone would make it fit",
    )


def _changes(job: TrainingJob, way: Candidate, available: Mapping[str, int]) -> Iterator[tuple[str, Step]]:
    """Changes that the user could make, one at a time and then two, each with the step it gives."""
    step, chunk = way.step, way.settings.chunk
    assert step is not None  # or nothing had been predicted
    assert job.video is not None
    low = step.with_frozen_halved()
    if chunk is None:
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

    def with_video(video: Video) -> Step:
        return replace(step, micro_batch=job.micro_batch(video.tokens, chunk))

    shorter = longest(job.video, lambda video: fits(predict(with_video(video)), available))
    if shorter is not None:
        yield job.advice("fewer_frames", shorter.length), with_video(shorter)


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


def lack(job: TrainingJob, limits: Limits, fits_whole: Callable[[TrainingJob], bool]) -> tuple[str, str]:
    """The bytes that the step that needs least lacks on the device of this process, where none fits; and the longest
    video that would fit, in the user's words, or nothing.

    Args:
        fits_whole: whether a job fits on one device, some of its blocks streamed if need be.
    """
    assert job.video is not None  # or nothing had been predicted
    device = job.devices[0]
    streams = Strategy.STREAM not in job.excluded and len(job.streamable) >= SLOTS
    chunks = job.request.chunks if streams else job.request.chunks[:1]
    tried = replace(job, request=replace(job.request, chunks=chunks))
    least = min(way.peaks[0].total for way in candidates(tried, limits, Strategy.RESIDENT))
    how = " with every block streamed" if streams else ""
    if streams:
        least += blocks_to_stream(job, len(job.streamable), None).device_bytes - job.model_bytes
    available = format_bytes(limits.available[device])
    lacks = f"at least {format_bytes(least)} are needed on {device}{how}, and {available} are available"
    shorter = longest(job.video, lambda video: fits_whole(replace(job, video=video)))
    return lacks, job.advice("fewer_frames", shorter.length) if shorter is not None else ""


def longest(video: Video, fits: Callable[[Video], bool]) -> Video | None:
    """The longest video that is shorter than this one and fits, or None."""
    shorter = [replace(video, frames=frames) for frames in range(1, video.frames)]
    count = bisect_left(shorter, True, key=lambda one: not fits(one))
    return shorter[count - 1] if count else None
