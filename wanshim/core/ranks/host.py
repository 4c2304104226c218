"""The ranks of a job that share this machine, counted by the ranks: not every launcher names them.

Importing this module imports no torch.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from wanshim.core.ranks.group import Group
from wanshim.core.ranks.store import default_store, wait_for
from wanshim.core.shared.processes import machine

WAIT_S = 30.0
_KEY = "wanshim/machine"

_known: WeakKeyDictionary[Any, Group] = WeakKeyDictionary()  # by process group


def host_ranks(launched: tuple[int, int] | None = None, *, wait_s: float = WAIT_S) -> Group:
    """The ranks of the default process group that run on this machine. Each rank leaves its machine's name in the
    group's store and reads the others'; the answer is kept for the group.

    Args:
        launched: this process's place and the number of processes here, by the launcher. They are returned where there
            is no process group (then the ranks cannot meet), where the launcher has started all of its ranks, and where
            another rank did not come within `wait_s`; None: this process is alone.

    Raises:
        WanshimError: the process group is that of the process that this one was forked from.
    """
    import torch.distributed as dist

    store = default_store()
    size = 1 if store is None else dist.get_world_size()
    index, count = launched or (0, 1)
    if size == 1:
        return Group(range(count), index)
    here = dist.PrefixStore(f"wanshim/host/{machine()}", store)
    by_launcher = Group(range(count), index, here if count > 1 else None)
    if count == size:
        return by_launcher
    group = dist.group.WORLD
    if group not in _known:
        rank, keys = dist.get_rank(), [f"{_KEY}/{number}" for number in range(size)]
        store.set(keys[rank], machine())
        if not wait_for(store, keys, wait_s):
            return by_launcher
        machines = [store.get(key).decode() for key in keys]
        ranks = [number for number, name in enumerate(machines) if name == machines[rank]]
        _known[group] = Group(ranks, ranks.index(rank), here if len(ranks) > 1 else None)
    return _known[group]
