"""How fast a device computes and how fast its link to host memory is: measured in a moment, once a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from wanshim.core.shared.host_memory import page_lock

_SIDE = {"cuda": 8192, "cpu": 512}  # of the square matrices
_LINK_BYTES = {"cuda": 2**28, "cpu": 2**22}


@dataclass(frozen=True)
class Speeds:
    """`link`: bytes a second from page-locked host memory; `flops`: of a bf16 matrix product, a second."""

    link: float
    flops: float

    def __str__(self) -> str:
        return f"link {self.link / 1e9:.1f} GB/s, {self.flops / 1e12:.0f} TFLOP/s"


@cache
def measure_speeds(device: torch.device) -> Speeds:
    """Take some tenths of a second and half a GiB of the device for it, the first time."""
    return Speeds(_link(device), _flops(device))


def _flops(device: torch.device) -> float:
    side = _SIDE[device.type]
    own = torch.Generator(device).manual_seed(0)  # the program's random draws stay as they are
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16, generator=own)
    return 2 * side**3 / _seconds(device, lambda: torch.mm(matrix, matrix))


def _link(device: torch.device) -> float:
    size = _LINK_BYTES[device.type]
    host = torch.zeros(size, dtype=torch.uint8)
    unlock = page_lock(host) if device.type == "cuda" else None
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = _seconds(device, lambda: target.copy_(host, non_blocking=True))
    if unlock is not None:
        unlock()
    return size / seconds


def _seconds(device: torch.device, work: Callable[[], object], repeats: int = 5) -> float:
    """Of the fastest of some runs after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        _synchronize(device)
        begin = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
