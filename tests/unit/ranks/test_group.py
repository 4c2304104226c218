"""Ranks of one store: what all bring, who is absent, and stores whose waits end when another process is gone."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.threads import at_once
from wanshim.core.ranks import group as module
from wanshim.core.ranks.group import Group
from wanshim.core.ranks.store import LocalStore
from wanshim.errors import RankAbsent, RanksFailed

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


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> dist.PrefixStore:
    """The store of a job whose ranks 4 and 7 are a group; this process is rank 7."""
    store = dist.PrefixStore("attempt_1", dist.HashStore())
    monkeypatch.setattr(module, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 7])
    monkeypatch.setattr(dist, "get_rank", lambda: 7)
    return store


def test_connection_of_its_own_has_the_prefix_of_the_store(job: dist.PrefixStore) -> None:
    """torchrun gives each restart a prefix of its own in one store: what an earlier attempt left is never read."""
    group = Group.of_job("a group", own=True)
    assert (group.ranks, group.rank, group.size) == ((4, 7), 1, 2)
    group.store.set("key", "value")
    assert group.store is not job
    assert job.check(["key"])
    assert not job.underlying_store.check(["key"])


def test_names_keep_groups_apart_and_ranks_those_of_one_name(
    job: dist.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group.of_job("a group", name="one").store.set("key", "value")
    assert not Group.of_job("a group", name="another").store.check(["key"])
    assert Group.of_job("a group", name="one").store.check(["key"])
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 7, 8])
    assert not Group.of_job("a group", name="one").store.check(["key"])


def test_rank_alone_waits_for_nobody() -> None:
    group = Group.of_job()
    assert (group.ranks, group.rank, group.store) == ((0,), 0, None)
    assert group.gather("topic", {"a": 1}, 60.0, "decode") == [{"a": 1}]


def test_all_ranks_have_what_each_brings_in_rank_order() -> None:
    store = dist.HashStore()
    pair = [Group((4, 7), rank, store) for rank in range(2)]
    for turn in range(2):
        found = at_once(*(partial(group.gather, "topic", [turn, group.rank], 60.0, "decode") for group in pair))
        assert found == [[[turn, 0], [turn, 1]]] * 2


def test_rank_that_does_not_come_is_named_by_its_number_in_the_job() -> None:
    with pytest.raises(RankAbsent, match=r"rank 7 did not call decode within 0\.05 s\..* each of ranks 4, 7 to call"):
        Group((4, 7), 0, dist.HashStore()).gather("topic", None, 0.05, "decode")


def pair() -> list[Group]:
    store = dist.HashStore()
    return [Group((4, 7), rank, store) for rank in range(2)]


def test_error_that_a_rank_brings_is_raised_by_the_others_and_the_next_gathering_works() -> None:
    first, second = pair()
    found, own = at_once(
        lambda: first.gather("topic", 1, 60.0, "decode"),
        lambda: second.gather("topic", 2, 60.0, "decode", MemoryError("no page")),
    )
    assert isinstance(found, RanksFailed)
    assert str(found).startswith("decode failed on rank 7: MemoryError: no page.")
    assert own == [1, None]
    assert at_once(*(partial(each.gather, "topic", each.rank, 60.0, "decode") for each in (first, second))) == [
        [0, 1],
        [0, 1],
    ]


@pytest.mark.parametrize("error", [MemoryError("no page"), RanksFailed("rank 4 failed")])
def test_error_of_a_body_reaches_the_others_where_they_gather_next_unless_they_have_it(error: Exception) -> None:
    first, second = pair()

    def fail() -> None:
        with second.failing_together("topic", 0.2, "decode"):
            raise error

    found, own = at_once(lambda: first.gather("topic", 1, 0.2, "decode"), fail)
    assert own is error
    assert isinstance(found, RankAbsent) == isinstance(error, RanksFailed)
    assert ("MemoryError: no page" in str(found)) == isinstance(error, MemoryError)


def test_error_of_a_body_is_raised_though_the_others_do_not_come() -> None:
    with pytest.raises(MemoryError), pair()[0].failing_together("topic", 0.05, "decode"):
        raise MemoryError("no page")


def test_topic_that_a_rank_ends_fails_for_all_and_no_other_topic_does() -> None:
    first, second = pair()
    second.fail("topic", MemoryError("no page"))
    for each in (first, second):
        with pytest.raises(RanksFailed, match=r"^rank 7 failed: MemoryError: no page\. Look for the first error"):
            each.gather("topic", None, 60.0, "decode")
    assert at_once(*(partial(each.gather, "other", 1, 60.0, "decode") for each in (first, second))) == [[1, 1]] * 2


def test_end_of_a_topic_that_the_store_does_not_take_hides_no_error() -> None:
    class Lost:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    Group((4, 7), 1, Lost()).fail("topic", MemoryError("no page"))
    Group().fail("topic", MemoryError("no page"))


def test_store_that_is_lost_is_one_error_that_names_this_rank() -> None:
    class Lost:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset\nframe #0: c10")

    with pytest.raises(RanksFailed, match=r"^rank 7 cannot reach the store of torch\.distributed: connection reset\."):
        Group((4, 7), 1, Lost()).gather("topic", None, 60.0, "decode")


@pytest.fixture
def file() -> Any:
    descriptor = os.memfd_create("test")
    yield descriptor
    gc.collect()  # a store opens its file by this number once more when it ends
    os.close(descriptor)


def test_processes_of_one_file_connect_over_the_loopback_address_alone(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, create = list[str](), dist.ProcessGroupGloo.create_device
    monkeypatch.setattr(
        dist.ProcessGroupGloo,
        "create_device",
        staticmethod(lambda hostname="": made.append(hostname) or create(hostname=hostname)),
    )
    pair = [Group.of_file(file, "half", (2, 3), rank) for rank in (2, 3)]
    assert [(group.rank, group.size, group.is_local) for group in pair] == [(0, 2, True), (1, 2, True)]

    def add_up(group: Group) -> float:
        wait = partial(group.store.wait, limit=LONG)
        peers = group.connect("sum", torch.device("cpu"), LONG, group, wait=wait)
        value = torch.ones(1) + group.rank
        peers.allreduce([value]).wait()
        return value.item()

    assert at_once(*(partial(add_up, group) for group in pair)) == [3.0, 3.0]
    assert made == ["127.0.0.1"] * 2


def test_process_that_is_gone_ends_the_wait_for_its_connection(file: int) -> None:
    group = Group.of_file(file, "half", (0, 1), 0)
    ends = at_once(
        lambda: group.connect("link", torch.device("cpu"), LONG, group, wait=partial(group.store.wait, limit=LONG)),
        group.store.gone.set,
    )
    assert str(ends[0]) == "a process is gone"
