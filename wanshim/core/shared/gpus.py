"""GPUs of this machine as NVML counts and reads them: https://docs.nvidia.com/deploy/nvml-api.

It makes no CUDA context, and importing this module imports neither torch nor pynvml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

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


def names() -> set[str] | None:
    """The names of this machine's GPUs, as torch has them; None where they cannot be known."""

    def ask(nvml: Any) -> set[str]:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return set(map(nvml.nvmlDeviceGetName, handles))

    nobody: set[str] = set()
    return _ask(ask, nobody)


def start() -> Any:
    """NVML, which its caller shuts down.

    Raises:
        pynvml.NVMLError: there is no driver.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml


@contextmanager
def opened() -> Iterator[Any]:
    """NVML until the end of the body, as `start` gives it."""
    nvml = start()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def handle(nvml: Any, index: int) -> Any:
    """NVML's handle of a CUDA device, by UUID: NVML counts all cards, torch those of CUDA_VISIBLE_DEVICES."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def utilisation(nvml: Any, of: Any) -> int | None:
    """Percent of a card; None of one that is divided by MIG."""
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(of).gpu)
    except nvml.NVMLError:
        return None


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
