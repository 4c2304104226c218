"""The order of units is one forward, one backward, and every wait ends."""

from __future__ import annotations

import threading

import pytest

from wanshim.core.pipeline.schedule import Abandoned, Schedule, Unit, pipeline_bound
from wanshim.errors import WanshimError


def order(stages: int, stage: int, count: int) -> list[str]:
    """The units of one stage, as they come due when nothing else holds them up."""
    schedule = Schedule(stages)
    schedule.close(count)
    units = []
    while len(units) < 2 * count:
        unit, number = schedule.due(stage)
        units.append(f"{unit.value[0].upper()}{number}")
        schedule.give(unit, stage)
    return units


@pytest.mark.parametrize(
    ("stages", "stage", "count", "expected"),
    [
        (2, 0, 3, "F0 F1 B0 F2 B1 B2"),
        (2, 1, 3, "F0 B0 F1 B1 F2 B2"),
        (4, 0, 5, "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"),
        (4, 2, 4, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (3, 0, 1, "F0 B0"),
    ],
)
def test_units_of_a_stage_come_one_forward_one_backward(stages: int, stage: int, count: int, expected: str) -> None:
    assert order(stages, stage, count) == expected.split()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stage_never_holds_more_micro_batches_than_stages_from_it_to_the_last(stages: int) -> None:
    for stage in range(stages):
        held = peak = 0
        for unit in order(stages, stage, 12):
            held += 1 if unit.startswith("F") else -1
            peak = max(peak, held)
        assert peak == stages - stage


def test_open_schedule_waits_for_a_forward_until_it_is_closed() -> None:
    schedule = Schedule(2)
    schedule.give(Unit.FORWARD, 0)
    assert schedule.due(0) == (Unit.FORWARD, 1)
    schedule.close(1)
    assert schedule.due(0) == (Unit.BACKWARD, 0)


def test_failure_frees_everyone_who_waits_and_keeps_the_first_error() -> None:
    schedule, caught = Schedule(2), []

    def wait() -> None:
        try:
            schedule.take(Unit.BACKWARD, 1, 0)
        except Abandoned as abandoned:
            caught.append(abandoned)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    first = ValueError("first")
    schedule.fail(first)
    schedule.fail(ValueError("second"))
    for thread in threads:
        thread.join(10)
    assert len(caught) == 3
    assert schedule.error is first


def test_thread_that_ends_without_a_word_wakes_those_who_wait_for_it() -> None:
    """As after a fork, where the threads of the parent are gone: nobody is left to notify."""
    schedule, left = Schedule(2), threading.Event()
    lane = threading.Thread(target=left.wait, name="lane 0", daemon=True)
    schedule.enroll(lane)
    lane.start()
    schedule.lead()
    schedule._changed.wait = lambda timeout: (left.set(), lane.join())  # it ends while the caller waits
    with pytest.raises(Abandoned):
        schedule.wait_until(lambda: False, "the loss of micro-batch 0")
    assert isinstance(schedule.error, WanshimError)
    assert "lane 0 has ended, the caller waits for the loss of micro-batch 0" in str(schedule.error)


def test_wait_looks_again_whether_the_others_live() -> None:
    schedule, limits, over = Schedule(1), [], threading.Event()
    lane = threading.Thread(target=over.wait, daemon=True)
    schedule.enroll(lane)
    lane.start()
    schedule._changed.wait = limits.append
    schedule.wait_until(lambda: len(limits) == 2, "two looks")
    over.set()
    assert all(0 < limit < 60 for limit in limits)


@pytest.mark.parametrize(
    ("stages", "count", "bound"), [(2, 1, 1.0), (2, 2, 4 / 3), (2, 4, 1.6), (2, 8, 16 / 9), (4, 8, 32 / 11)]
)
def test_bound_is_that_of_a_pipeline_with_a_flush(stages: int, count: int, bound: float) -> None:
    assert pipeline_bound(stages, count) == pytest.approx(bound)
