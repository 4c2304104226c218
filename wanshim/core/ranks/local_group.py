"""Processes of one machine that meet without torch.distributed's default group, and gloo between them.

Importing this module imports no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.001


class LocalStore:
    """A store of torch.distributed whose waits end when another process is known to be gone."""

    def __init__(self, store: Any) -> None:
        self.store, self.gone = store, threading.Event()

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        """Return when all keys are set.

        Raises:
            RuntimeError: they are not in time, or another process is gone.
        """
        end = time.monotonic() + limit.total_seconds()
        while self.gone.is_set() or not self.store.check(list(keys)):
            if self.gone.is_set() or time.monotonic() > end:
                raise RuntimeError("a process is gone" if self.gone.is_set() else "nothing came in time")
            time.sleep(_POLL_SECONDS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGroup:
    """What stands for a group of torch.distributed.

    Args:
        rank: of this process, of `size`.
        store: which these processes alone reach.
    """

    rank: int
    size: int
    store: LocalStore


def connect_gloo(store: Any, rank: int, size: int, limit: timedelta, *, on_one_machine: bool) -> Any:
    """A gloo process group for point-to-point traffic and exchanges.

    Args:
        on_one_machine: it binds no address that another machine reaches.
    """
    import torch.distributed as dist

    if not on_one_machine:
        return dist.ProcessGroupGloo(store, rank, size, limit)
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._timeout, options._devices = limit, [backend.create_device(hostname=_LOOPBACK)]
    return backend(store, rank, size, options)
