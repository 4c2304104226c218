"""What is still to come of a FastVideo run, from any step on. Its trainers need a GPU; the counts are arithmetic."""

from __future__ import annotations

import importlib.metadata

import pytest

from wanshim.adapters.fastvideo.training_run import describe
from wanshim.core.training import GlobalSteps
from wanshim.core.training.recorder import TrainingRun


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.1")


def after(done: int, validate_every: int = 3, checkpoint_every: int = 4) -> TrainingRun:
    return describe(
        GlobalSteps(steps=12), ".", done,
        checkpoint_every=checkpoint_every, validate_every=validate_every, saves_last=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("done", "validations", "checkpoints"),
    [(0, 4, 4), (2, 4, 4), (3, 3, 4), (7, 2, 3), (8, 2, 2), (11, 1, 2), (12, 0, 1), (13, 0, 1)],
)
def test_resumed_run_counts_what_is_still_to_come(done: int, validations: int, checkpoints: int) -> None:
    run = after(done)
    assert (run.validations, run.checkpoints, run.done) == (validations, checkpoints, done)


def test_run_that_never_validates_has_none_to_come() -> None:
    run = after(5, 0, 0)
    assert (run.validations, run.checkpoints) == (0, 1)
