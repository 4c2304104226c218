"""Memory and utilisation of the GPUs of this process, by NVML (nvidia-ml-py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        self._handles: dict[str, Any] = {}
        self._readings: dict[str, GpuReading] = {}
        self._next = 0.0
        for device in dict.fromkeys(devices):
            try:
                self._handles[device] = _handle(device)
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
            import pynvml

            handle = self._handles[device]
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            self._readings[device] = GpuReading(int(memory.used), int(memory.total), _utilisation(handle))
        except Exception as error:
            self.absent[device] = f"{error}" or type(error).__name__
            self._handles.pop(device, None)
            self._readings.pop(device, None)


def _utilisation(handle: Any) -> int | None:
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:  # cards divided by MIG have none
        return None


def _handle(device: str) -> Any:
    """The NVML handle by UUID: NVML counts all cards, torch those of CUDA_VISIBLE_DEVICES."""
    if not device.startswith("cuda"):
        raise RuntimeError(f"{device} is no GPU")
    try:
        import pynvml
    except ImportError:
        raise RuntimeError("nvidia-ml-py is not installed: pip install 'wanshim[monitor]'") from None
    import torch

    from wanshim.core.shared.gpu_memory import indexed

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(indexed(device)).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
