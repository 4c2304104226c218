"""Memory and utilisation of the GPUs of this process, by NVML (nvidia-ml-py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wanshim.core.shared import gpus

INTERVAL_S = 1.0


@dataclass(frozen=True)
class GpuReading:
    """Of the whole card, as nvidia-smi shows it. Bytes and percent."""

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
        self._nvml: Any = None
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
        try:
            of = self._handles[device]
            memory = self._nvml.nvmlDeviceGetMemoryInfo(of)
            used = gpus.utilisation(self._nvml, of)
            self._readings[device] = GpuReading(int(memory.used), int(memory.total), used)
        except Exception as error:
            self.absent[device] = f"{error}" or type(error).__name__
            self._handles.pop(device, None)
            self._readings.pop(device, None)

    def _handle(self, device: str) -> Any:
        if not device.startswith("cuda"):
            raise RuntimeError(f"{device} is no GPU")
        from wanshim.core.shared.gpu_memory import indexed

        self._nvml = gpus.start()  # as long as this process lives
        return gpus.handle(self._nvml, indexed(device).index)
