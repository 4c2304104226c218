"""How many GPUs are in sight, without torch: CUDA_VISIBLE_DEVICES over what the driver counts."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

from wanshim.core.shared import gpus


def loads(monkeypatch: pytest.MonkeyPatch, count: int | None, error: int = 0, others: tuple[Path, ...] = ()) -> None:
    """NVML of a machine with `count` GPUs; None: without its library."""

    def start() -> None:
        if count is None or error:
            raise pynvml.NVMLError(error or pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", start)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda index: f"NVIDIA X{index}")
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
    loads(monkeypatch, 4)
    assert gpus.in_sight(visible) == count


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "2,1,0,3"), ("3,1, 0", "0,1,3"), ("GPU-1,GPU-2,GPU-3", "GPU-3,GPU-2,GPU-1"), ("0,1,2,9", "2,1,0")],
)
def test_two_devices_exchange_their_numbers(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str
) -> None:
    loads(monkeypatch, 4)
    assert gpus.exchanged(visible, 0, 2) == expected


def test_devices_that_cannot_be_counted_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, None, others=(Path("/"),))
    assert gpus.exchanged(None, 0, 1) is None
    loads(monkeypatch, 4)
    assert gpus.exchanged("0,1", 0, 2) is None


def test_machine_without_a_driver_has_none_and_one_with_another_driver_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads(monkeypatch, None)
    assert gpus.in_sight("0,1") == 0
    loads(monkeypatch, 0, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert gpus.in_sight("0,1") == 0
    loads(monkeypatch, 0, pynvml.NVML_ERROR_NO_PERMISSION)
    assert gpus.in_sight("0,1") is None
    loads(monkeypatch, None, others=(Path("/"),))
    assert gpus.in_sight("0,1") is None
    assert gpus.in_sight("") == 0


def test_names_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, 2)
    assert gpus.names() == {"NVIDIA X0", "NVIDIA X1"}
    loads(monkeypatch, None)
    assert gpus.names() == set()
    loads(monkeypatch, None, others=(Path("/"),))
    assert gpus.names() is None
