"""How many bytes of each device a training step may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wanshim.core.model_split.plan import format_bytes
from wanshim.core.shared.gpu_memory import available_bytes
from wanshim.core.strategy.predict import DevicePeak


def available_on(devices: Iterable[str]) -> dict[str, int]:
    """`available_bytes` of each device that has a limit."""
    return {device: count for device in devices if (count := available_bytes(device)) is not None}


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
    """What each device that has a limit would need of it."""
    return "; ".join(
        f"{device} would need {format_bytes(count)} of {format_bytes(available[device])}"
        for device, count in needed.items()
        if device in available
    )
