"""Threads as ranks of one store: whatever calls were made alone, the next call of all ranks is one round."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.unit.threads import at_once
from wanshim.core.ranks import group as ranks_group
from wanshim.core.ranks.group import KEPT_ROUNDS, Rendezvous, Round
from wanshim.errors import RankAbsent, RanksFailed

LONG, SHORT = 20.0, 0.05


def ranks(size: int, store: dist.Store | None = None) -> list[Rendezvous]:
    store = store or dist.HashStore()
    return [Rendezvous(store, "test", range(size), rank) for rank in range(size)]


def meet_all(members: list[Rendezvous], word: str) -> list[Any]:
    return at_once(*(lambda m=m, r=r: m.meet([word, r], LONG, "decode") for r, m in enumerate(members)))


def assert_met(ends: list[Any], word: str) -> None:
    assert all(isinstance(end, Round) for end in ends), ends
    assert len({end.number for end in ends}) == 1
    assert [end.replies for end in ends] == [[[word, rank] for rank in range(len(ends))]] * len(ends)


@pytest.mark.parametrize("seed", range(10))
def test_all_ranks_meet_after_any_calls_made_alone(seed: int) -> None:
    choose = random.Random(seed)
    members = ranks(3)
    for turn in range(6):
        for _ in range(choose.randrange(4)):
            some = choose.sample(range(3), choose.choice((1, 2)))
            ends = at_once(*(lambda m=members[r]: m.meet("stale", SHORT, "decode") for r in some))
            assert all(isinstance(end, RankAbsent) for end in ends)
        if choose.random() < 0.3:  # a new decoder on one rank
            rank = choose.randrange(3)
            members[rank] = Rendezvous(members[rank]._store, "test", range(3), rank)
        assert_met(meet_all(members, f"turn {turn}"), f"turn {turn}")


def test_absent_names_ranks_that_never_came_and_ranks_that_gave_up() -> None:
    first, second, _ = ranks(3)
    waits = threading.Event()
    inner = second._store.set

    class Store:
        """Says when rank 1 has joined."""

        def __getattr__(self, name: str) -> Any:
            return getattr(inner.__self__, name)

        def set(self, key: str, value: str) -> None:
            inner(key, value)
            waits.set()

    second._store = Store()

    def joins_then_gives_up() -> Round:
        waits.wait(LONG)
        return first.meet("a", SHORT, "decode")

    ends = at_once(joins_then_gives_up, lambda: second.meet("b", 1.0, "decode"))
    assert [end.found for end in ends] == [
        "rank 2 did not call decode within 0.05 s",
        "rank 2 did not call decode within 1 s; rank 0 called decode and gave up before all ranks were there",
    ]


def test_rank_that_comes_while_another_gives_up_waits_on_for_the_rest() -> None:
    members = ranks(3)
    gone = threading.Event()

    def gives_up_then_comes() -> Any:
        with pytest.raises(RankAbsent):
            members[0].meet("stale", 0.3, "decode")
        gone.set()
        return members[0].meet(["x", 0], LONG, "decode")

    def comes_after() -> Any:
        gone.wait(LONG)
        return members[2].meet(["x", 2], LONG, "decode")

    assert_met(at_once(gives_up_then_comes, lambda: members[1].meet(["x", 1], LONG, "decode"), comes_after), "x")


def test_rank_whose_time_is_over_when_it_wakes_joins_no_other_round(monkeypatch: pytest.MonkeyPatch) -> None:
    member, now = ranks(2)[0], [0.0]
    store = member._store
    monkeypatch.setattr(ranks_group.time, "monotonic", lambda: now[0])

    class Late:
        """Wakes whoever waits when rank 1 has given up, after the deadline."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def wait(self, *_: Any) -> None:
            store.set("test/0/outcome", "gave up 1")
            now[0] = LONG

    member._store = Late()
    with pytest.raises(RankAbsent):
        member.meet("x", LONG, "decode")
    assert store.get("test/round") == b"1"
    assert not store.check(["test/1/0"])


def test_interrupted_wait_takes_the_rank_out_of_the_round() -> None:
    members = ranks(2)
    store = members[0]._store

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def wait(self, *_: Any) -> None:
            raise KeyboardInterrupt

    members[0]._store = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        members[0].meet("stale", LONG, "decode")
    members[0]._store = store
    assert_met(meet_all(members, "next"), "next")


def test_old_rounds_leave_the_store() -> None:
    store = dist.HashStore()
    members = ranks(2, store)
    for turn in range(3 * KEPT_ROUNDS):
        assert_met(meet_all(members, str(turn)), str(turn))
    assert store.num_keys() <= 6 * KEPT_ROUNDS + 8


def test_store_that_is_lost_raises_at_once_and_is_not_taken_for_an_absent_rank() -> None:
    member = ranks(2)[0]
    store = member._store

    class Lost:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def wait(self, *_: Any) -> None:
            raise RuntimeError("connection reset")

        compare_set = wait

    member._store = Lost()
    with pytest.raises(RuntimeError, match="connection reset"):
        member.meet("x", LONG, "decode")


def test_another_object_of_the_name_joins_the_next_round_at_once() -> None:
    """Whoever is woken by a complete round may call through another object before the last comer has gone on."""
    store = dist.HashStore()
    slow = threading.Event()

    class LastComer(Rendezvous):
        def _advance(self, number: int) -> None:
            slow.wait(60)
            super()._advance(number)

    def first() -> list[Round]:
        found = [Rendezvous(store, "test", range(2), 0).meet("first", LONG, "decode")]
        store.wait(["test/0/outcome"])
        other = threading.Timer(0.2, slow.set)
        other.start()
        return [*found, Rendezvous(store, "test", range(2), 0).meet("second", LONG, "decode")]

    def last() -> list[Round]:
        member = LastComer(store, "test", range(2), 1)
        store.wait(["test/0/0"])
        return [member.meet("first", LONG, "decode"), member.meet("second", LONG, "decode")]

    for rounds in at_once(first, last):
        assert [found.number for found in rounds] == [0, 1]
        assert [found.replies for found in rounds] == [["first", "first"], ["second", "second"]]


def test_the_first_rank_which_may_host_the_store_stays_until_all_have_read() -> None:
    first, second = ranks(2)
    store, order = first._store, list[str]()

    class SlowToRead:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def get(self, key: str) -> bytes:
            time.sleep(0.1)
            order.append("read")
            return bytes(store.get(key))

    second._store = SlowToRead()

    def meets_and_ends() -> None:
        first.meet("a", LONG, "decode")
        order.append("ended")

    at_once(meets_and_ends, lambda: second.meet("b", LONG, "decode"))
    assert order == ["read", "read", "ended"]


def test_failure_ends_who_waits_and_who_comes_later_with_the_first_text() -> None:
    first, second, third = ranks(3)

    def fails_when_the_first_waits() -> None:
        second._store.wait(["test/0/0"])
        second.fail("no memory on rank 1")

    waited, _ = at_once(lambda: first.meet("a", LONG, "decode"), fails_when_the_first_waits)
    third.fail("its consequence")
    later = at_once(lambda: third.meet("c", LONG, "decode"))[0]
    assert [type(end) for end in (waited, later)] == [RanksFailed, RanksFailed]
    assert {end.found for end in (waited, later)} == {"no memory on rank 1"}


def test_failure_after_a_complete_round_ends_the_next() -> None:
    members = ranks(2)
    assert_met(meet_all(members, "x"), "x")
    members[0].fail("later")
    with pytest.raises(RanksFailed, match="later"):
        members[1].meet("y", LONG, "decode")


def test_rounds_that_others_give_up_do_not_extend_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    member, now, limits = ranks(3)[0], [0.0], list[float]()
    store = member._store
    monkeypatch.setattr(ranks_group.time, "monotonic", lambda: now[0])

    class GivingUp:
        """Rank 1 gives up each round 0.4 s after this rank has joined it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def wait(self, keys: list[str], limit: Any) -> None:
            limits.append(limit.total_seconds())
            assert len(limits) < 10, "the deadline began anew in each round"
            store.set(keys[0], "gave up 1")
            now[0] += 0.4

    member._store = GivingUp()
    with pytest.raises(RankAbsent):
        member.meet("x", 1.0, "decode")
    assert limits == pytest.approx([1.0, 0.6, 0.2])
