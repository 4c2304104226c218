"""The store that torch.distributed keeps for the default process group: access to it, and waiting in it.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from .forks import refuse_inherited_group


def default_store() -> Any:
    """The default group's store; None where there is no process group.

    Raises:
        UsedAfterFork: this process was forked from the one that made the group.
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
