"""What a group does beside exchanges: what is overdue, what is left in the store, and how a rank leaves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wanshim.core.ranks import group as ranks_module
from wanshim.core.sequence import group as module
from wanshim.core.sequence.attendance import Attendance
from wanshim.core.sequence.group import SequenceGroup
from wanshim.core.sequence.leader import Leader
from wanshim.errors import ModelInvalid, RanksFailed

RANKS = [4, 7, 2]
Make = Callable[..., SequenceGroup]


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


@pytest.fixture
def make(store: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> Make:
    """One rank of ranks 4, 7 and 2 of a job."""
    monkeypatch.setattr(ranks_module, "default_store", lambda: store)
    monkeypatch.setattr(module, "_made", {(4, 7, 2): 0})
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: RANKS)

    def rank(place: int, deadline: float = 60.0) -> SequenceGroup:
        monkeypatch.setattr(dist, "get_rank", lambda: RANKS[place])
        module._made[4, 7, 2] = 0  # each stands for a process of its own
        return SequenceGroup.of("a group", deadline)  # type: ignore[arg-type]

    return rank


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def test_rank_is_its_place_in_the_group(make: Make) -> None:
    group = make(1)
    assert (group.rank, group.size, group.ranks) == (1, 3, (4, 7, 2))


def test_groups_of_the_same_ranks_keep_apart_in_the_store(make: Make) -> None:
    first = make(0)
    second = SequenceGroup.of("a group", 60.0)  # type: ignore[arg-type]
    first.publish("key", "of the first")
    assert not second.store.check(["key"])


class Flight:
    """An exchange that is over when the test says so."""

    def __init__(self, over: bool = False) -> None:
        self.over = over

    def is_completed(self) -> bool:
        return self.over


def test_first_exchange_that_is_not_over_by_the_deadline_is_reported(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    group, done, stuck = make(0), Flight(over=True), Flight()
    for step, flight in (("block 1", done), ("block 2", stuck), ("block 3", Flight())):
        group.watch.at(step)
        group._sent(flight, None, None)
    clock[0] += group.deadline - 1
    assert group._overdue() is None
    clock[0] += 2
    assert group._overdue() == "block 2"
    stuck.over = True
    assert group._overdue() == "block 3"


def test_wait_ends_at_the_deadline_and_names_its_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False] * 3 + [True])
    make(0).poll(lambda: next(looks))
    group = make(0, deadline=0.02)
    group.watch.at("sum of gradients")
    with pytest.raises(RanksFailed, match=r"rank 4: nothing within 0\.02 s in sum of gradients"):
        group.poll(lambda: False)


def test_what_the_first_rank_makes_leaves_nothing_in_the_store(make: Make, store: dist.HashStore) -> None:
    groups = [make(place) for place in range(3)]
    leaders, counts = [Leader(group, Attendance(group)) for group in groups], []
    device = torch.device("cpu")
    for _ in range(3):
        found = at_once(*(lambda leader=leader: leader.share(lambda: {"a": 1}, device) for leader in leaders))
        assert found == [{"a": 1}] * 3
        counts.append(store.num_keys())
    assert counts[0] == counts[2]


def test_rank_that_goes_ahead_overwrites_no_text_that_another_has_yet_to_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, sent = [make(place) for place in range(3)], list[str]()
    publish, published = SequenceGroup.publish, SequenceGroup.published

    def noted(group: SequenceGroup, key: str, text: str) -> None:
        publish(group, key, text)
        sent.append(text)

    def late(group: SequenceGroup, key: str, step: str) -> str:
        """The third rank begins to read when the others have sent both texts."""
        if group is groups[2]:
            group.poll(lambda: {"0 second", "1 second"} <= set(sent), interval=0.001)
        return published(group, key, step)

    monkeypatch.setattr(SequenceGroup, "publish", noted)
    monkeypatch.setattr(SequenceGroup, "published", late)

    def twice(place: int) -> list[list[str]]:
        return [groups[place].gather_text("text", f"{place} {which}") for which in ("first", "second")]

    expected = [[f"{place} {which}" for place in range(3)] for which in ("first", "second")]
    assert at_once(*(partial(twice, place) for place in range(3))) == [expected] * 3


def test_step_after_a_meeting_is_the_one_before_it(make: Make) -> None:
    groups = [make(place) for place in range(3)]
    for group in groups:
        group.watch.at("block 3")
    at_once(*(lambda group=group: group.gather_text("here", "") for group in groups))
    assert {group.watch.step for group in groups} == {"block 3"}


def test_model_that_moved_to_another_device_is_one_clear_error(make: Make) -> None:
    group = make(0)
    group._peers, group._device = SimpleNamespace(), torch.device("cpu")
    with pytest.raises(ModelInvalid, match=r"tensors on meta in a group that began on cpu.*Call remove\(\) before"):
        group.sum(torch.empty(1, device="meta"))


def test_rank_that_leaves_wakes_those_that_wait_for_it(make: Make) -> None:
    group, calls = make(0), []

    def abort() -> None:
        calls.append("abort")
        raise RuntimeError("whatever state it is in")

    group._peers = SimpleNamespace(abort=abort, shutdown=lambda: calls.append("shutdown"))
    group.close()
    group.close()
    assert calls == ["abort", "shutdown"]
    assert group.watch._mine["left"]


def test_failed_exchange_ends_with_the_error_of_the_rank_that_caused_it(make: Make) -> None:
    group, other = make(0), make(1)
    other.watch.fail("error", "ValueError: no such sample")
    group.watch._statuses[1] = other.watch._mine
    group.watch.at("block 4")

    def broken(*_: Any) -> None:
        raise RuntimeError("peer closed\nframe #0: c10")

    group._peers, group._device = SimpleNamespace(allreduce=broken), torch.device("cpu")
    with pytest.raises(RanksFailed, match="stopped: rank 7: ValueError: no such sample"):
        group.sum(torch.zeros(1))
    assert group.watch._mine["failure"] == ["connection", "block 4: peer closed"]


def test_turns_leave_the_keys_of_few_in_the_store(make: Make, store: dist.HashStore) -> None:
    ranks, counts = [Attendance(make(place)) for place in range(3)], []
    for _ in range(6):
        assert at_once(*(partial(each.together, "a call") for each in ranks)) == [True] * 3
        counts.append(store.num_keys())
    assert counts[-1] == counts[2] < 3 * counts[0]


def test_key_of_this_turn_stays_for_a_rank_that_has_yet_to_look(make: Make) -> None:
    rank = Attendance(make(0))
    rank._leave("first")
    rank._leave("second")
    assert rank._store.check(["first", "second"])
