"""A double of a machine with one GPU, as accelerate names it for one process: the device is `cuda`, without an index.

Tensors lie on the host. The functions of `torch.cuda` that want an index check it as torch's own do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda._utils import _get_device_index
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.unit import fake_streams

MEMORY = 2**34  # bytes of the card


class OnTheHost(TorchFunctionMode):
    """Whatever is asked for on a GPU is made on the host."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        return func(*tree_map(_on_the_host, args), **tree_map(_on_the_host, kwargs or {}))


class Device(nullcontext[None]):
    """`torch.cuda.device`, a class that torch asks for."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.idx = _get_device_index(device, optional=True)


def _on_the_host(value: Any) -> Any:
    is_gpu = str(value).startswith("cuda") if isinstance(value, (str, torch.device)) else False
    return torch.device("cpu") if is_gpu else value


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device of every Accelerator while the test runs: `cuda`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    def memory(size: int) -> Callable[..., int]:
        return lambda device=None: _get_device_index(device, optional=True) * 0 + size

    def fraction(device: Any = None) -> float:
        return 1.0 if device is None else _get_device_index(device) * 0 + 1.0

    doubles = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "mem_get_info": lambda device=None: (memory(MEMORY)(device),) * 2,
        "memory_reserved": memory(0),
        "memory_allocated": memory(0),
        "get_per_process_memory_fraction": fraction,
        "synchronize": memory(0),
        "device": Device,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
    }
    device = torch.device("cuda")
    Accelerator()  # on the host; those that follow share its state
    for state in (PartialState, AcceleratorState):
        monkeypatch.setitem(state._shared_state, "device", device)
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)  # C++ would look for a driver
    with OnTheHost(), fake_streams.Streams(monkeypatch):
        yield device
    gc.collect()  # page locks end with their tensors, while the doubles stand
