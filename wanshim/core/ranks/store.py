"""Stores of torch.distributed: that of the default process group, that of one machine, and waiting in them.

Importing this module imports no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from wanshim.core.shared.forks import refuse_inherited_group

READ = ("read", "all read")  # how many ranks have read what stands under a key, and that all have
_STAY_S = 2.0
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


def default_store() -> Any:
    """The default group's store; None where there is no process group.

    Raises:
        WanshimError: this process was forked from the one that made the group.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    refuse_inherited_group()
    module: Any = dist.distributed_c10d  # torch keeps the store, but names no public way to it
    return module._get_default_store()


def set_once(store: Any, key: str, value: str) -> str:
    """Set `key` to `value` unless it has a value; the value that stands. Whoever waits for `key` is woken.

    torch's store without libuv wakes nobody at `compare_set` itself.
    """
    stands = str(store.compare_set(key, "", value).decode())
    store.set(key, stands)
    return stands


def wait_for(store: Any, keys: Sequence[str], seconds: float) -> bool:
    """Wait until all `keys` are set; False where they are not within `seconds`, or the store cannot be reached.

    torch raises one error for both; a store that is gone shows at the next operation.
    """
    try:
        store.wait(list(keys), timedelta(seconds=max(seconds, 0.001)))
    except (RuntimeError, OSError):
        return False
    return True


def stay_until_read(store: Any, key: str, readers: int, *, host: bool) -> None:
    """This rank has read what the `readers` left under `key`. Who may host the store, and end right after this call,
    returns when all have read, or after a short time."""
    count, all_read = (f"{key}/{name}" for name in READ)
    with suppress(RuntimeError, OSError):
        if store.add(count, 1) == readers:
            store.set(all_read, "")
        elif host:
            wait_for(store, [all_read], _STAY_S)
