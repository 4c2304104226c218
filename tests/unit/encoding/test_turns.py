from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.encoding.turns import FileTurns, StoreTurns, Turns, sign

MakeTurns = Callable[[], Turns]


@pytest.fixture(params=["file", "store"])
def make(request: pytest.FixtureRequest, directory: CacheDirectory) -> MakeTurns:
    if request.param == "file":
        return lambda: FileTurns(directory, "prompt")
    store = dist.HashStore()
    return lambda: StoreTurns(store, "prompt", beat_s=0.02, stale_s=0.3)


def test_turn_is_held_by_one_at_a_time(make: MakeTurns) -> None:
    first, second = make(), make()
    assert first.claim()
    assert not second.claim()
    first.release()
    assert second.claim()


def test_turn_kept_while_its_holder_works(make: MakeTurns) -> None:
    first, second = make(), make()
    first.claim()
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        assert not second.claim()
        time.sleep(0.02)


def test_turn_note_reaches_those_who_wait(make: MakeTurns) -> None:
    first, second = make(), make()
    first.claim()
    second.claim()
    first.write(sign("failed", 3, "no memory"))
    note = second.last()
    assert note is not None
    assert (note.state, note.rank, note.reason) == ("failed", 3, "no memory")


def test_turn_note_outlives_the_turn(make: MakeTurns) -> None:
    first, second = make(), make()
    first.claim()
    first.write(sign("failed", 3, "no memory"))
    first.release()
    assert second.claim()
    note = second.last()
    assert note is not None
    assert note.reason == "no memory"


def test_turn_note_too_long_is_cut_and_stays_readable(make: MakeTurns) -> None:
    first, second = make(), make()
    first.claim()
    first.write(sign("failed", 0, "\x1b色" * 5000))
    note = second.last()
    assert note is not None
    assert note.state == "failed"


def test_turn_given_back_without_work_goes_to_the_next(make: MakeTurns) -> None:
    first, second, third = make(), make(), make()
    first.claim()
    first.release()
    assert second.claim()
    second.release()
    assert third.claim()


def test_store_turn_of_a_holder_that_stopped_beating_is_taken_over() -> None:
    store = dist.HashStore()
    first = StoreTurns(store, "prompt", beat_s=60, stale_s=0.2)
    second = StoreTurns(store, "prompt", beat_s=0.05, stale_s=0.2)
    first.claim()
    first.write(sign("encoding", 1))
    assert not second.claim()
    deadline = time.monotonic() + 5
    while not second.claim():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    note = second.last()
    assert note is not None
    assert (note.state, note.rank) == ("encoding", 1)
