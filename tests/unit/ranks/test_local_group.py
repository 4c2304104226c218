"""A store whose waits end when another process is gone."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from wanshim.core.ranks.local_group import LocalStore

LONG = timedelta(seconds=60)


def test_wait_returns_when_all_keys_are_set() -> None:
    store = LocalStore(dist.HashStore())
    store.set("a", "1")
    store.set("b", "1")
    store.wait(["a", "b"], LONG)


def test_wait_for_a_key_that_does_not_come_ends_in_time() -> None:
    store = LocalStore(dist.HashStore())
    store.set("a", "1")
    with pytest.raises(RuntimeError, match="nothing came in time"):
        store.wait(["a", "b"], timedelta(seconds=0.05))


@pytest.mark.parametrize("is_set", [False, True])
def test_wait_raises_once_a_process_is_gone_whether_the_key_is_set_or_not(is_set: bool) -> None:
    store = LocalStore(dist.HashStore())
    if is_set:
        store.set("a", "1")
    store.gone.set()
    with pytest.raises(RuntimeError, match="a process is gone"):
        store.wait(["a"], LONG)
