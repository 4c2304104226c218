"""Whether a predicted step fits, and what would where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from wanshim.core.model_split.plan import format_bytes
from wanshim.core.strategy.predict import DevicePeak, Job, predict
from wanshim.errors import PlacementInvalid

# What the caching allocator holds beyond the tensors: fragments and rounding, as a share of the device.
ALLOCATOR_SHARE = 0.02
# What lanes leave unused between blocks of memory of several streams, without expandable segments. Measured on 2 x H200
# (benchmarks/results/model_split_lanes_offload_2xH200.json): 24.9 GiB reserved for a peak of 21.8, which then did not
# fit 23.0; with expandable segments it fitted 22.0.
LANES_SHARE = 0.13


@dataclass(frozen=True)
class Proposal:
    """A change, in the user's words, and the step as it would then be."""

    change: str
    job: Job


def available_bytes(device: str | torch.device) -> int | None:
    """Bytes this process may hold on a CUDA device, with what it holds there already; None elsewhere.

    The least of what is free (CUDA contexts and other processes count as taken), and the share that
    `torch.cuda.set_per_process_memory_fraction` leaves, less a margin for the allocator.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * torch.cuda.get_per_process_memory_fraction(device))
    most = min(free + torch.cuda.memory_reserved(device), share)
    return int(most * (1 - ALLOCATOR_SHARE))


def available_on(devices: Iterable[str]) -> dict[str, int]:
    """`available_bytes` of each device that has a limit."""
    return {device: count for device in devices if (count := available_bytes(device)) is not None}


def usable(job: Job, available: Mapping[str, int], *, expandable_segments: bool) -> Mapping[str, int]:
    """What of `available` a step may count on: micro-batches that overlap leave gaps in the allocator's memory."""
    if job.in_flight == 1 or expandable_segments:
        return available
    return {device: int(count * (1 - LANES_SHARE)) for device, count in available.items()}


def within(needed: Mapping[str, int], available: Mapping[str, int]) -> bool:
    """Whether every device that has a limit keeps it."""
    return all(count <= available[device] for device, count in needed.items() if device in available)


def comparison(needed: Mapping[str, int], available: Mapping[str, int]) -> str:
    """What each device that has a limit would need of it."""
    return "; ".join(
        f"{device} would need {format_bytes(count)} of {format_bytes(available[device])}"
        for device, count in needed.items()
        if device in available
    )


def fits(peaks: Sequence[DevicePeak], available: Mapping[str, int]) -> bool:
    """Whether a step with these peaks keeps every limit."""
    return within(_by_device(peaks), available)


def check_fit(job: Job, available: Mapping[str, int], proposals: Iterable[Proposal]) -> tuple[DevicePeak, ...]:
    """The predicted peaks of a step that fits.

    Args:
        available: bytes by device; a device that is not named has no limit.
        proposals: what the user could change, worked out only where it is needed. Those are told that fit by the
            same prediction.

    Raises:
        PlacementInvalid: it does not fit; with predicted and available bytes of each device, and what would.
    """
    peaks = predict(job)
    if fits(peaks, available):
        return peaks
    ways = [f"{p.change} ({_totals(predict(p.job))})" for p in proposals if fits(predict(p.job), available)]
    raise PlacementInvalid(
        "this training step does not fit: " + comparison(_by_device(peaks), available),
        expected="a predicted peak within each device's memory: " + "; ".join(map(str, peaks)),
        hint=f"What would fit: {'; '.join(ways)}" if ways else "None of the known changes alone would make it fit",
    )


def split_points_that_fit(job: Job, available: Mapping[str, int]) -> tuple[int, ...] | None:
    """Split points that leave every device most room, if any fit; three stages at most are tried."""
    limited = [device for device in job.devices if device in available]
    if len(job.devices) > 3 or not limited:
        return None
    tried = [replace(job, points=points) for points in combinations(range(1, len(job.blocks)), len(job.devices) - 1)]
    best = max(tried, key=lambda one: _room(one, available))
    return best.points if fits(predict(best), available) else None


def _room(job: Job, available: Mapping[str, int]) -> int:
    return min(available[peak.device] - peak.total for peak in predict(job) if peak.device in available)


def _by_device(peaks: Sequence[DevicePeak]) -> dict[str, int]:
    return {peak.device: peak.total for peak in peaks}


def _totals(peaks: Sequence[DevicePeak]) -> str:
    return ", ".join(f"{peak.device} {format_bytes(peak.total)}" for peak in peaks)
