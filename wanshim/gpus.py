"""How many GPUs a program started here would see. Asks the driver, not torch, whose import takes seconds."""

from __future__ import annotations

import ctypes
from pathlib import Path

from wanshim import settings

NO_DRIVER = 9  # NVML_ERROR_DRIVER_NOT_LOADED
# Other drivers than NVIDIA's, and NVIDIA's without its library: there may be GPUs that cannot be counted here.
OTHER_DRIVERS = ("/dev/kfd", "/dev/dxg", "/proc/driver/nvidia/gpus")


def in_sight() -> int | None:
    """The number of GPUs under CUDA_VISIBLE_DEVICES; None where it cannot be known."""
    present = _present()
    listed = settings.foreign().get("CUDA_VISIBLE_DEVICES")
    return present if listed is None else _listed(listed, present)


def _listed(text: str, present: int | None) -> int | None:
    """CUDA's reading of the list: it ends at the first entry that is no GPU."""
    entries = [entry.strip() for entry in text.split(",")]
    if present == 0 or entries[0] in ("", "-1"):
        return 0
    if present is None:
        return None
    if entries[0].startswith(("GPU-", "MIG-")):
        return len(entries)
    count = 0
    for entry in entries:
        if not entry.isdigit() or int(entry) >= present:
            break
        count += 1
    return count


def _present() -> int | None:
    """NVML's count, which starts no CUDA: https://docs.nvidia.com/deploy/nvml-api."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None if any(Path(path).exists() for path in OTHER_DRIVERS) else 0
    started = nvml.nvmlInit_v2()
    if started != 0:
        return 0 if started == NO_DRIVER else None
    count = ctypes.c_uint()
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return None if failed else count.value
