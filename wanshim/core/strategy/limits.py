"""The bytes of each device that a training step may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wanshim.core.model_split.plan import format_bytes
from wanshim.core.shared.gpu_memory import available_bytes
from wanshim.core.strategy.job import Limits
from wanshim.core.strategy.predict import DevicePeak, Step

# What stays unused between blocks of memory of several streams, without expandable segments. Measured on 2 x H200 with
# a pipeline (benchmarks/results/model_split_lanes_offload_2xH200.json): 24.9 GiB reserved for a peak of 21.8, which did
# not fit 23.0; with expandable segments it fitted 22.0. Sequence parallel on 4 x H200 ran out of 22.0 GiB with 19.5
# allocated and 2.1 in gaps; with expandable segments it ran with a peak of 20.5.
GAP_SHARE = 0.13
# The same with expandable segments and kept blocks, which fill a device: 139.0 GiB reserved for a peak of 135.6 on one
# H200 (benchmarks/results/training_step_blocks_1xH200.json). Without, the same step ran out of memory.
EXPANDABLE_GAP_SHARE = 0.03


def available_on(devices: Iterable[str]) -> dict[str, int]:
    """`available_bytes` of each device that has a limit."""
    return {device: count for device in devices if (count := available_bytes(device)) is not None}


def usable(step: Step, limits: Limits) -> Mapping[str, int]:
    """The bytes of each device on which a step may count: micro-batches that overlap leave gaps in the allocator's
    memory, and kept blocks fill it."""
    if any(step.num_kept_blocks):
        return without_gaps(limits.available, EXPANDABLE_GAP_SHARE if limits.expandable_segments else GAP_SHARE)
    if step.in_flight == 1 or limits.expandable_segments:
        return limits.available
    return without_gaps(limits.available)


def without_gaps(available: Mapping[str, int], share: float = GAP_SHARE) -> Mapping[str, int]:
    """The part of `available` that holds tensors where the allocator leaves this share of it between them."""
    return {device: int(count * (1 - share)) for device, count in available.items()}


def within(needed: Mapping[str, int], available: Mapping[str, int]) -> bool:
    """Whether every device that has a limit keeps it."""
    return all(count <= available[device] for device, count in needed.items() if device in available)


def fits(peaks: Sequence[DevicePeak], available: Mapping[str, int]) -> bool:
    """Whether a step with these peaks keeps every limit."""
    return within(by_device(peaks), available)


def by_device(peaks: Sequence[DevicePeak]) -> dict[str, int]:
    """Bytes of each device's peak."""
    return {peak.device: peak.total for peak in peaks}


def comparison(needed: Mapping[str, int], available: Mapping[str, int]) -> str:
    """A comparison, for each device that has a limit, of the need with it."""
    return "; ".join(
        f"{device} would need {format_bytes(count)} of {format_bytes(available[device])}"
        for device, count in needed.items()
        if device in available
    )
