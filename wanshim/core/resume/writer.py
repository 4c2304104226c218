"""States are written behind training: one thread, one state at a time."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from wanshim.core.resume.state import RunState, write_state
from wanshim.core.shared.host_memory import HostPool, room_for, view_of

log = logging.getLogger("wanshim")

ALIGNMENT = 64  # bytes: each tensor begins with a cache line


class StateWriter:
    """Writes the states of one run to `run`. A state that cannot be written is one warning; the one before stays."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.written = 0  # the step of the newest state that is on the disk
        self._thread: threading.Thread | None = None
        self._memory: torch.Tensor  # stays page-locked as long as this object lives
        self._host: dict[str, torch.Tensor] = {}  # the copies in it, used again by the next state

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Allocate the host memory of a state of these tensors, so that no step waits for it; its bytes.

        One piece, page-locked if a GPU copies to it: torch's own page-locked memory rounds each tensor up to a power of
        two.

        Raises:
            HostMemoryInvalid: the host has not that much.
        """
        ends = list(accumulate(map(_aligned, tensors.values())))
        pool = HostPool(locked=any(tensor.is_cuda for tensor in tensors.values()))
        with room_for(ends[-1], "a saved state of the run"):  # else Linux ends the process
            self._memory = pool.take(ends[-1]).memory
        self._host = {
            name: view_of(self._memory, tensor.new_empty(tensor.shape, device="meta"), begin)
            for (name, tensor), begin in zip(tensors.items(), [0, *ends], strict=False)
        }
        return ends[-1]

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def write(self, step: int, facts: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Returns when the tensors are copied to host memory; waits for a state that is still being written."""
        self.finish()
        if not _alike(tensors, self._host):
            self.reserve(tensors)
        _copy(tensors, self._host)
        state = RunState(facts, self._host)
        self._thread = threading.Thread(target=self._write, args=(step, state), name="wanshim-state")
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last state is on the disk."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, step: int, state: RunState) -> None:
        try:
            write_state(self.run, step, state)
            self.written = step
        except Exception as error:  # whatever the disk has, training goes on
            log.warning(
                "wanshim: the state of step %d is not saved, and the one before it stays: it takes %d bytes, %s has %s"
                " free: %s", step, state.bytes, self.run, _free(self.run), error,
            )  # fmt: skip


def _free(folder: Path) -> str:
    try:
        return str(shutil.disk_usage(folder).free)
    except OSError as error:
        return f"an unknown number ({error.strerror})"


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _alike(tensors: Mapping[str, torch.Tensor], host: Mapping[str, torch.Tensor]) -> bool:
    return tensors.keys() == host.keys() and all(
        (host[name].shape, host[name].dtype) == (tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    )


def _copy(tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    """All copies from GPUs are on their way at once."""
    for name, tensor in tensors.items():
        into[name].copy_(tensor.detach(), non_blocking=True)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
