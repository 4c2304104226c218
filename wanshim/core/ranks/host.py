"""The ranks of a job that share this machine, counted by the ranks: not every launcher names them.

Importing this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from wanshim.core.ranks.store import default_store, wait_for
from wanshim.core.shared.processes import machine

WAIT_S = 30.0
_KEY = "wanshim/machine"


@dataclass(frozen=True, slots=True)
class HostRanks:
    """This process is rank `index` of the `count` on its machine."""

    index: int = 0
    count: int = 1


_known: WeakKeyDictionary[Any, HostRanks] = WeakKeyDictionary()  # by process group


def host_ranks(launched: HostRanks | None = None, *, wait_s: float = WAIT_S) -> HostRanks:
    """The ranks of the default process group that run on this machine. Each rank leaves its machine's name in the
    group's store and reads the others'; the answer is kept for the group.

    Args:
        launched: the launcher's numbers. They are returned where there is no process group, where the launcher has
            started all of its ranks, and where another rank did not come within `wait_s`; None: this process is alone.

    Raises:
        WanshimError: the process group is that of the process that this one was forked from.
    """
    import torch.distributed as dist

    store = default_store()
    size = 1 if store is None else dist.get_world_size()
    if size == 1 or (launched is not None and launched.count == size):
        return launched or HostRanks()
    group = dist.group.WORLD
    if group not in _known:
        rank, keys = dist.get_rank(), [f"{_KEY}/{number}" for number in range(size)]
        store.set(keys[rank], machine())
        if not wait_for(store, keys, wait_s):
            return launched or HostRanks()
        machines = [store.get(key).decode() for key in keys]
        here = [number for number, name in enumerate(machines) if name == machines[rank]]
        _known[group] = HostRanks(here.index(rank), len(here))
    return _known[group]
