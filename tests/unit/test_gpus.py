"""How many GPUs are in sight, without torch: CUDA_VISIBLE_DEVICES over what the driver counts."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from wanshim import gpus


class Driver:
    """NVML, of a machine with `count` GPUs."""

    def __init__(self, count: int, started: int = 0) -> None:
        self.count, self.started = count, started

    def nvmlInit_v2(self) -> int:
        return self.started

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index
        return 0

    def nvmlDeviceGetName(self, device: Any, name: Any, length: int) -> int:
        name.value = f"NVIDIA X{device.value or 0}"[:length].encode()
        return 0

    def nvmlShutdown(self) -> int:
        return 0


def loads(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, others: tuple[str, ...] = ()) -> None:
    def load(name: str) -> Driver:
        assert name == "libnvidia-ml.so.1"
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(gpus, "OTHER_DRIVERS", others)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2, 3", 2),
        ("0,9,1", 1),
        ("1,-1,2", 1),
        ("0,1,0", 0),
        ("0,1,9,0", 2),
        ("GPU-1,GPU-2", 2),
        ("GPU-1,GPU-1", 0),
        ("GPU-1,0", 1),
        ("MIG-1", 1),
    ],
)
def test_visible_devices_are_counted_as_cuda_reads_them(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    loads(monkeypatch, Driver(4))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.in_sight() == count


def test_machine_without_a_driver_has_none_and_one_with_another_driver_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    loads(monkeypatch, None)
    assert gpus.in_sight() == 0
    loads(monkeypatch, Driver(0, started=gpus.NO_DRIVER))
    assert gpus.in_sight() == 0
    loads(monkeypatch, Driver(0, started=4))
    assert gpus.in_sight() is None
    loads(monkeypatch, None, others=("/",))
    assert gpus.in_sight() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.in_sight() == 0


def test_names_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, Driver(2))
    assert gpus.names() == {"NVIDIA X0", "NVIDIA X1"}
    loads(monkeypatch, None)
    assert gpus.names() == set()
    loads(monkeypatch, None, others=("/",))
    assert gpus.names() is None
