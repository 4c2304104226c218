"""States are written behind training: one thread, one state at a time."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from wanshim.core.resume.state import RunState, write_state

log = logging.getLogger("wanshim")


class StateWriter:
    """Writes the states of one run to `run`. A state that cannot be written is one warning; the one before stays."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._thread: threading.Thread | None = None
        self._host: dict[str, torch.Tensor] = {}  # the copies on the host, used again by the next state

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def write(self, step: int, facts: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Returns when the tensors are copied to host memory; waits for a state that is still being written."""
        self.finish()
        self._host = _to_host(tensors, self._host)
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


def _to_host(tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the host: page-locked where they come from a GPU, so that all of them are on their way at once."""
    copies = {}
    for name, tensor in tensors.items():
        copy = into.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies
