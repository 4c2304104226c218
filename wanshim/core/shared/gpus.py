"""GPUs of this machine as NVML counts and reads them: https://docs.nvidia.com/deploy/nvml-api.

It makes no CUDA context, and importing this module imports neither torch nor pynvml.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
INTERVAL_S = 1.0

# Other drivers than NVIDIA's, and NVIDIA's without its library: there may be GPUs that cannot be counted here.
OTHER_DRIVERS = (Path("/dev/kfd"), Path("/dev/dxg"), Path("/proc/driver/nvidia/gpus"))


def in_sight(visible: str | None) -> int | None:
    """The number of GPUs that a program would see; None where it cannot be known.

    Args:
        visible: CUDA_VISIBLE_DEVICES as the program has it, read as CUDA does: the list ends at the first entry that is
            no GPU, and with one twice it is none at all.
    """
    present = _ask(lambda nvml: int(nvml.nvmlDeviceGetCount()), 0)
    if visible is None:
        return present
    entries = [entry.strip() for entry in visible.split(",")]
    if present == 0 or entries[0] in ("", "-1"):
        return 0
    if present is None:
        return None
    kind = entries[0][:4]
    if kind in ("GPU-", "MIG-"):
        valid = list(takewhile(lambda entry: entry.startswith(kind), entries))
    else:
        valid = list(takewhile(lambda entry: entry.isdecimal() and int(entry) < present, entries))
    return len(valid) if len(set(valid)) == len(valid) else 0


def exchanged(visible: str | None, one: int, other: int) -> str | None:
    """CUDA_VISIBLE_DEVICES for a process in which two devices have exchanged their numbers; None where it cannot be
    known which GPUs this one sees.

    Args:
        visible: as of `in_sight`.
    """
    count = in_sight(visible)
    if count is None or max(one, other) >= count:
        return None
    entries = list(map(str, range(count))) if visible is None else [entry.strip() for entry in visible.split(",")]
    entries[one], entries[other] = entries[other], entries[one]
    return ",".join(entries[:count])


def names() -> set[str] | None:
    """The names of this machine's GPUs, as torch has them; None where they cannot be known."""

    def ask(nvml: Any) -> set[str]:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return set(map(nvml.nvmlDeviceGetName, handles))

    nobody: set[str] = set()
    return _ask(ask, nobody)


@contextmanager
def opened() -> Iterator[Any]:
    """NVML until the end of the body.

    Raises:
        pynvml.NVMLError: there is no driver.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def handle(nvml: Any, index: int) -> Any:
    """NVML's handle of a CUDA device, by UUID: NVML counts all cards, torch those of CUDA_VISIBLE_DEVICES."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _ask(question: Callable[[Any], T], none: T) -> T | None:
    """The answer of NVML; `none` where there is no GPU, and None where that cannot be known."""
    import pynvml

    try:
        with opened() as nvml:
            return question(nvml)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return None if any(path.exists() for path in OTHER_DRIVERS) else none
        return none if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED else None


@dataclass(frozen=True)
class GpuReading:
    """A reading of the whole card, as nvidia-smi shows it. Bytes and percent."""

    memory: int
    memory_total: int
    utilisation: int | None


class GpuMeter:
    """Reads each device at most once a second. Never raises: a card that cannot be read is named in `absent`.

    Args:
        devices: torch device names, such as `("cuda:0", "cuda:1")`. One that is no GPU is absent too.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.absent: dict[str, str] = {}
        self._handles: dict[str, Any] = {}
        self._readings: dict[str, GpuReading] = {}
        self._next = 0.0
        for device in dict.fromkeys(devices):
            try:
                self._handles[device] = self._handle(device)
            except Exception as error:  # NVML errors are classes of their own; none of them may reach training
                self.absent[device] = f"{error}" or type(error).__name__

    def read(self) -> dict[str, GpuReading]:
        """The latest reading of each device that has one."""
        now = time.monotonic()
        if now >= self._next and self._handles:
            self._next = now + INTERVAL_S
            for device in list(self._handles):
                self._read(device)
        return self._readings

    def _read(self, device: str) -> None:
        import pynvml

        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handles[device])
            utilisation = None
            with suppress(pynvml.NVMLError):  # cards divided by MIG have none
                utilisation = int(pynvml.nvmlDeviceGetUtilizationRates(self._handles[device]).gpu)
            self._readings[device] = GpuReading(int(memory.used), int(memory.total), utilisation)
        except Exception as error:
            self.absent[device] = f"{error}" or type(error).__name__
            self._handles.pop(device, None)
            self._readings.pop(device, None)

    @staticmethod
    def _handle(device: str) -> Any:
        if not device.startswith("cuda"):
            raise RuntimeError(f"{device} is no GPU")
        import pynvml

        from wanshim.core.shared.gpu_memory import indexed

        pynvml.nvmlInit()  # as long as this process lives
        return handle(pynvml, indexed(device).index)
