"""A value that is settled once, in each store that a process group may have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue

import pytest
import torch.distributed as dist

from wanshim.core.ranks.store import set_once, wait_for

WAIT_S = 60.0  # a bound for a machine under load; whoever is not woken waits all of it


def _tcp(*, use_libuv: bool) -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)


STORES = [dist.HashStore, lambda: _tcp(use_libuv=True), lambda: _tcp(use_libuv=False)]


@pytest.mark.parametrize("make", STORES, ids=["hash", "tcp", "tcp without libuv"])
def test_settling_wakes_whoever_waits_and_the_first_value_stands(make: Callable[[], dist.Store]) -> None:
    store = make()
    other = store if isinstance(store, dist.HashStore) else dist.TCPStore("127.0.0.1", store.port, is_master=False)
    woken: Queue[bool] = Queue()
    keys = [f"key{number}" for number in range(20)]
    threading.Thread(target=lambda: [woken.put(wait_for(other, [key], WAIT_S)) for key in keys], daemon=True).start()
    for key in keys:
        for _ in range(20):  # the other one is likely to wait by then; if it is not, this key proves nothing
            store.check([key])
        assert set_once(store, key, "first") == "first"
        assert set_once(store, key, "second") == "first"
        assert woken.get(timeout=WAIT_S / 2)
        assert store.get(key) == b"first"
