"""Access to the default store, and waits that end."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from wanshim.core.shared.store import default_store, wait_for


def test_without_a_process_group_there_is_no_store() -> None:
    assert default_store() is None


def test_what_is_set_in_the_default_store_is_in_the_one_the_group_was_made_with() -> None:
    made = dist.HashStore()
    dist.init_process_group("gloo", store=made, rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        keys = made.num_keys()
        default_store().set("key", "value")
        assert made.num_keys() == keys + 1
    finally:
        dist.destroy_process_group()


def test_a_wait_reports_whether_all_keys_came() -> None:
    store = dist.HashStore()
    store.set("a", "1")
    assert wait_for(store, ["a"], 0.01)
    assert not wait_for(store, ["a", "b"], 0.01)
