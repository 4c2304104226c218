"""What the ranks of a group learn of each other: two ranks of one store, in one process.

The group is ranks 4 and 0 of a job, so that no place in the group is a rank's number.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from wanshim.core.ranks import watch as module
from wanshim.core.ranks.group import Group as Ranks
from wanshim.core.ranks.watch import Watch, different_calls
from wanshim.errors import RankDisagreement, RanksFailed

RANKS = (4, 0)
BOUND_S = 60.0  # for a machine under load, not what anything takes
MODEL = {"model": "Wan", "blocks": 40}


def until(ready: Callable[[], Any]) -> None:
    end = time.monotonic() + BOUND_S
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.002)


class Group:
    """The two ranks of the group, and how often each has woken those who wait in its communicator."""

    def __init__(self) -> None:
        self.store, self.aborts, self.made = dist.HashStore(), [0, 0], list[Watch]()

    def rank(self, place: int, deadline: float = BOUND_S, overdue: Callable[[], str | None] = lambda: None) -> Watch:
        def abort() -> None:
            self.aborts[place] += 1

        watch = Watch(Ranks(RANKS, place, self.store), deadline, overdue=overdue, abort=abort)
        self.made.append(watch)
        return watch

    def started(self, **options: Any) -> tuple[Watch, Watch]:
        pair = self.rank(0, **options), self.rank(1, **options)
        start(*pair)
        return pair


def start(*watches: Watch, models: tuple[dict[str, Any], ...] = (MODEL, MODEL)) -> None:
    """All at once, as the ranks of a job."""
    with ThreadPoolExecutor(len(watches)) as pool:
        list(pool.map(Watch.start, watches, models))


def start_first(watch: Watch, other: Watch) -> None:
    """`other` meets it and starts no thread."""
    other._publish()
    with ThreadPoolExecutor(1) as thread:
        met = thread.submit(other._group.gather, "model", json.dumps(MODEL, sort_keys=True), BOUND_S, "shard_sequence")
        watch.start(MODEL)
        met.result()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.005)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)  # what `start` chains to and `stop` puts back
    made = Group()
    yield made
    for watch in reversed(made.made):
        watch.stop()


def test_rank_that_does_not_come_is_named_by_its_number_in_the_job(group: Group) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 did not call shard_sequence within 0\.05 s\. .* ranks 4, 0"):
        group.rank(0, deadline=0.05).start(MODEL)


def test_different_models_are_shown_beside_the_ranks_numbers(group: Group) -> None:
    other = {"model": "Wan", "blocks": 30}
    with ThreadPoolExecutor(2) as threads:
        for started in [threads.submit(group.rank(place).start, (MODEL, other)[place]) for place in (0, 1)]:
            with pytest.raises(RankDisagreement, match=r'rank 4: .*"blocks": 40.*\n  rank 0: .*"blocks": 30'):
                started.result()


def test_error_of_one_rank_reaches_the_other_with_its_name_and_wakes_it(group: Group) -> None:
    one, other = group.started()
    one.check()
    one.fail_with(ValueError("no such sample\nand a second line"))
    until(lambda: other.failed and group.aborts[1])
    for watch in (one, other):
        with pytest.raises(RanksFailed, match=r"ranks 4, 0 stopped: rank 4: ValueError: no such sample\. Expected"):
            watch.check()


@pytest.mark.parametrize("code", [None, 0])
def test_normal_exit_of_one_rank_ends_the_other_with_its_status(group: Group, code: int | None) -> None:
    one, other = group.started()
    one.fail_with(SystemExit(code))
    until(lambda: other.failed and group.aborts[1])
    with pytest.raises(SystemExit) as caught:
        other.check()
    assert caught.value.code == 0


def test_exit_with_a_status_and_an_error_beside_an_exit_are_failures(group: Group) -> None:
    one, other = group.started()
    one.fail_with(SystemExit())
    other.fail_with(SystemExit("no more memory"))
    until(lambda: (one._statuses[1]["failure"] or [""])[0] == "error")
    with pytest.raises(RanksFailed, match=r"stopped: rank 0: SystemExit: no more memory\. Expected"):
        one.check()


def test_failed_exchange_gives_way_to_the_error_that_explains_it(group: Group) -> None:
    one, other = group.started()
    other.fail("connection", "gather: peer closed")
    one.fail("error", "ValueError: no such sample")
    for watch in (one, other):
        text = str(watch.cause())
        assert "rank 4: ValueError: no such sample" in text
        assert "peer closed" not in text


def test_first_failure_of_a_rank_is_the_one_that_counts(group: Group) -> None:
    one, _ = group.started()
    one.fail("error", "the first")
    one.fail("error", "its consequence")
    assert "rank 4: the first." in str(one.cause())


def test_rank_that_waits_too_long_says_where_every_rank_is(group: Group) -> None:
    late: list[str] = []
    one, other = group.rank(0, overdue=lambda: late[0] if late else None), group.rank(1)
    start(one, other)
    one.called(3, "x")
    other.at("gradient of what all blocks share")
    until(lambda: one._statuses[1]["step"].startswith("gradient"))
    late.append("block 7")
    until(lambda: one.failed and other.failed)
    one.at("block 8")
    text = str(one.cause())
    assert f"rank 4: nothing within {BOUND_S:g} s in block 7" in text
    assert "(rank 4 is in call 3, block 8; rank 0 is in call 0, gradient of what all blocks share)" in text


def end_thread(watch: Watch) -> None:
    """Nobody says farewell: as in a process that was killed."""
    watch._stop.set()
    watch._wake.set()
    watch._thread.join(BOUND_S)


def beat_twice(watch: Watch) -> None:
    beats = watch._mine["beat"]
    until(lambda: watch._mine["beat"] > beats + 2)


@pytest.mark.parametrize(
    ("kind", "limit", "text"),
    [
        ("ended", BOUND_S, "its process has ended"),
        ("stopped", BOUND_S / 4, "its process is stopped, for 15 s"),
        ("unknown", BOUND_S, "no sign of life for 60 s"),
    ],
)
def test_rank_without_a_sign_of_life_is_gone(
    kind: str, limit: float, text: str, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = group.started()
    state: list[str] = ["runs"]
    monkeypatch.setattr(module, "process_state", lambda name: state[0])
    other.at("block 5")
    other._publish()
    end_thread(other)
    until(lambda: one._statuses[1]["beat"] == other._mine["beat"])
    one._moved[1] -= 10 * BOUND_S
    beat_twice(one)
    assert not one.failed  # its interpreter may be held
    one._moved[1] = time.monotonic() - limit + 5
    state[0] = kind
    beat_twice(one)
    assert one.failed is (kind == "ended")
    one._moved[1] -= 6
    until(lambda: one.failed)
    assert f"stopped: rank 0: gone, {text}, last in call 0, block 5." in str(one.cause())


def test_lost_connection_is_explained_by_the_rank_that_is_gone(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "process_state", lambda name: "unknown")  # on another machine
    one, other = group.started()
    end_thread(other)
    until(lambda: one._statuses[1]["beat"] == other._mine["beat"])
    one.fail("connection", "gather: peer closed")
    one._moved[1] -= 2 * one.silence
    assert "stopped: rank 0: gone, no sign of life" in str(one.cause())


def test_ranks_that_wait_for_each_other_are_named_once(group: Group) -> None:
    one, other = group.started()
    for watch in (one, other):
        end_thread(watch)
    for watch in (one, other):
        watch.fail("waited", "nothing within 60 s in block 7")
    one._read()
    assert str(one.cause()).count("nothing within 60 s") == 1


def test_group_that_was_left_is_kept_by_nobody(group: Group) -> None:
    watch = Watch(Ranks((4,), 0, group.store), BOUND_S, overdue=lambda: None, abort=lambda: None)
    watch.start(MODEL)
    watch.stop()
    left = weakref.ref(watch)
    del watch
    gc.collect()
    assert left() is None


def test_rank_that_gives_signs_of_life_is_not_gone(group: Group) -> None:
    one, other = group.started()
    one._moved[1] = began = time.monotonic() - one.silence / 2
    beat_twice(other)
    until(lambda: one._moved[1] > began)


def test_rank_whose_process_cannot_be_seen_is_judged_by_its_beats(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "process_state", lambda name: "ended" if name else "unknown")
    one, other = group.started()
    for watch in (one, other):
        beat_twice(watch)
    assert not one.failed


def test_silence_is_a_quarter_of_the_deadline_and_20_seconds_at_most(group: Group) -> None:
    assert [group.rank(0, deadline).silence for deadline in (8.0, 80.0, 300.0)] == [2.0, 20.0, 20.0]


@pytest.mark.parametrize("way", ["left", "failed"])
def test_rank_that_has_said_why_it_is_silent_is_not_gone(way: str, group: Group) -> None:
    one, other = group.started()
    if way == "left":
        other.stop()
        other.stop()
    else:
        end_thread(other)
        other.fail("error", "ValueError: no such sample")
    until(lambda: one._statuses[1]["left"] or one._statuses[1]["failure"])
    one._moved[1] -= 2 * one.silence
    beat_twice(one)
    assert one.failed is (way == "failed")
    assert not one._mine["failure"] or one._mine["failure"][0] == "connection"


def test_different_calls_end_both_ranks_with_one_table(group: Group) -> None:
    one, other = group.started()
    one.called(1, "x [1, 30, 20]")
    other.called(1, "x [1, 31, 20]")
    until(lambda: one.failed and other.failed)
    texts = {str(watch.cause()) for watch in (one, other)}
    assert {type(watch.cause()) for watch in (one, other)} == {RankDisagreement}
    assert len(texts) == 1
    assert "different inputs:\n  rank 4: x [1, 30, 20]\n  rank 0: x [1, 31, 20]" in texts.pop()


def test_last_eight_calls_are_kept(group: Group) -> None:
    """A rank may be that far ahead of another before a difference in their calls goes unseen."""
    watch = group.rank(0)
    for number in range(1, 12):
        watch.called(number, "x")
    assert [number for number, _ in watch._mine["calls"]] == list(range(4, 12))


def test_store_that_is_gone_ends_the_wait_and_says_where_this_rank_is(group: Group) -> None:
    one, _ = group.started()
    one.called(2, "x")
    one.at("block 3")

    def gone(*_: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    one._store = type("Gone", (), {"set": gone, "get": gone})()
    until(lambda: group.aborts[0])
    assert "which rank 0 of the job hosts, is gone; call 2, block 3" in str(one.cause())


class Farewell:
    """What Python shows of an error that nobody catches, and whether the process ends later than it could."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, watch: Watch, other: Watch) -> None:
        self.shown: list[BaseException] = []
        self.slept = 0
        monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: self.shown.append(error))
        start_first(watch, other)
        end_thread(watch)  # it would read and sleep as well
        clock = [0.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

        def sleep(seconds: float) -> None:
            self.slept += 1
            clock[0] += seconds

        monkeypatch.setattr(module.time, "sleep", sleep)


@pytest.mark.parametrize(("place", "waits"), [(0, False), (1, True)], ids=["rank 4", "rank 0, which hosts the store"])
def test_uncaught_error_is_published_and_shown_and_only_the_host_of_the_store_stays(
    place: int, waits: bool, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, other = group.rank(place), group.rank(1 - place)
    farewell, error = Farewell(monkeypatch, watch, other), KeyError("sample")
    sys.excepthook(KeyError, error, None)
    assert farewell.shown == [error]
    assert (farewell.slept > 0) is waits
    other._read()
    assert other._statuses[place]["failure"] == ["error", "KeyError: 'sample'"]
    farewell.slept = 0
    other.fail("connection", "peer closed")
    sys.excepthook(KeyError, error, None)
    assert farewell.slept == 0  # everybody knows


def test_hook_of_uncaught_errors_is_put_back(group: Group) -> None:
    before = sys.excepthook
    one = group.rank(0)
    other = group.rank(1)
    start_first(one, other)
    assert sys.excepthook != before
    one.stop()
    assert sys.excepthook is before


def test_hook_that_came_later_is_left_alone(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = group.started()

    def later(*_: Any) -> None: ...

    monkeypatch.setattr(sys, "excepthook", later)
    one.stop()
    assert sys.excepthook is later


def test_rank_that_computes_alone_is_not_counted_for_an_hour_after_each_sign_of_it(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, other = group.rank(0), group.rank(1)
    start_first(watch, other)
    end_thread(watch)  # it would read as well
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

    def held_after(seconds: float) -> bool:
        clock[0] += seconds
        other._publish()
        watch._read()
        return watch.held_at == clock[0]

    assert not held_after(1)
    other.works_alone()
    assert held_after(0)
    assert held_after(module.ALONE_SECONDS - 1)
    assert not held_after(1)
    other.works_alone()
    assert held_after(1)
    other.takes_turn(1, "loss")
    assert not held_after(1)
    other.works_alone()
    assert held_after(2 * module.ALONE_SECONDS)


def test_turn_of_a_rank_is_the_last_that_it_has_begun_and_no_other_comes_after_it_has_left(group: Group) -> None:
    one, other = group.started()
    assert one.turn_of(1) == 0
    for number in (3, 4):
        other.takes_turn(number, "loss")
    until(lambda: one.turn_of(1) == 4)
    other.stop()
    until(lambda: one.turn_of(1) == float("inf"))


def test_ranks_that_make_different_calls_end_with_one_table(group: Group) -> None:
    one, other = group.started()
    one.takes_turn(1, "loss")
    other.takes_turn(1, "validation")
    until(lambda: one.failed and other.failed)
    for watch in (one, other):
        assert "not make the same calls:\n  rank 4: loss\n  rank 0: validation" in str(watch.cause())


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([[], []], []),
        ([[[1, "a"]], []], []),
        ([[[1, "a"], [2, "b"]], [[1, "a"]]], []),
        ([[[1, "a"], [2, "b"]], [[1, "a"], [2, "c"]]], ["b", "c"]),
        ([[[1, "a"]], [[1, "b"], [2, "b"]], []], ["a", "b", "not known"]),
    ],
    ids=["none", "one rank is ahead", "one call is known to one", "the second differs", "a third has not called"],
)
def test_first_call_with_different_inputs_is_found(calls: list[list[tuple[int, str]]], expected: list[str]) -> None:
    assert different_calls(calls) == expected


def test_rank_that_has_left_is_not_gone_when_its_process_ends(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = group.started()
    one.stop()
    monkeypatch.setattr(module, "process_state", lambda name: "ended")
    beat = other._mine["beat"]
    until(lambda: other._mine["beat"] > beat + 5)
    other.check()
    assert group.aborts == [0, 0]
