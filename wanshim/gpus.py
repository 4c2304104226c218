"""How many GPUs a program started here would see. Asks the driver, not torch, whose import takes seconds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from wanshim import settings

T = TypeVar("T")

NO_DRIVER = 9  # NVML_ERROR_DRIVER_NOT_LOADED
# Other drivers than NVIDIA's, and NVIDIA's without its library: there may be GPUs that cannot be counted here.
OTHER_DRIVERS = ("/dev/kfd", "/dev/dxg", "/proc/driver/nvidia/gpus")


def in_sight() -> int | None:
    """The number of GPUs under CUDA_VISIBLE_DEVICES; None where it cannot be known."""
    present = _present()
    listed = settings.foreign().get("CUDA_VISIBLE_DEVICES")
    return present if listed is None else _listed(listed, present)


def _listed(text: str, present: int | None) -> int | None:
    """CUDA's reading of the list: it ends at the first entry that is no GPU, and with one twice it is none at all."""
    entries = [entry.strip() for entry in text.split(",")]
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


def names() -> set[str] | None:
    """The names of this machine's GPUs, as torch has them; None where they cannot be known."""

    def ask(nvml: ctypes.CDLL, count: int) -> set[str]:
        found = set()
        for index in range(count):
            device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            nvml.nvmlDeviceGetName(device, name, len(name))
            found.add(name.value.decode(errors="replace"))
        return found

    nobody: set[str] = set()
    return _ask(ask, nobody)


def _present() -> int | None:
    return _ask(lambda nvml, count: count, 0)


def _ask(question: Callable[[ctypes.CDLL, int], T], none: T) -> T | None:
    """NVML, which starts no CUDA, and its count of GPUs: https://docs.nvidia.com/deploy/nvml-api.

    Returns:
        the answer; `none` where there is no GPU, and None where that cannot be known.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None if any(Path(path).exists() for path in OTHER_DRIVERS) else none
    started = nvml.nvmlInit_v2()
    if started != 0:
        return none if started == NO_DRIVER else None
    count = ctypes.c_uint()
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    answer = None if failed else question(nvml, count.value)
    nvml.nvmlShutdown()
    return answer
