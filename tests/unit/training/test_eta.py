from __future__ import annotations

import pytest

from wanshim.core.training.eta import StepEta


def test_first_step_does_not_count_once_there_is_another() -> None:
    pace = StepEta(10)
    pace.add(60.0)
    assert pace.eta_seconds == 9 * 60
    for _ in range(3):
        pace.add(2.0)
    assert pace.step_seconds == 2.0
    assert pace.eta_seconds == 12.0


def test_last_micro_batch_of_a_group_is_not_lost_in_the_median() -> None:
    """Two of three micro-batches take 1 s, the third 4 s: 2 s each, where a median would say 1 s."""
    pace = StepEta(300, group=3)
    for _ in range(20):
        for seconds in (1.0, 1.0, 4.0):
            pace.add(seconds)
    assert pace.step_seconds == pytest.approx(2.0)
    assert pace.eta_seconds == pytest.approx(480.0)


def test_checkpoints_still_to_come_are_added() -> None:
    pace = StepEta(10, checkpoints=3)
    pace.add(1.0)
    pace.add(1.0, checkpoint_seconds=30.0)
    assert pace.eta_seconds == 8 + 2 * 30


def test_one_hiccup_does_not_move_the_eta() -> None:
    pace = StepEta(100)
    for step in range(50):
        pace.add(500.0 if step == 30 else 1.0)
    assert pace.eta_seconds == 50.0


def test_unknown_length_has_no_eta() -> None:
    pace = StepEta(None)
    pace.add(1.0)
    assert pace.eta_seconds is None
    assert pace.step_seconds == 1.0


def test_nothing_done_has_no_eta() -> None:
    assert StepEta(10).eta_seconds is None


def test_validations_and_checkpoints_have_medians_of_their_own() -> None:
    pace = StepEta(10, checkpoints=2, validations=3)
    pace.add(1.0)
    pace.add(1.0, checkpoint_seconds=30.0, validation_seconds=5.0)
    assert pace.eta_seconds == 8 + 30 + 2 * 5


def test_resumed_run_has_only_its_rest_to_go_and_its_first_step_does_not_count() -> None:
    pace = StepEta(100, done=90)
    pace.add(60.0)
    pace.add(2.0)
    assert pace.eta_seconds == 8 * 2
