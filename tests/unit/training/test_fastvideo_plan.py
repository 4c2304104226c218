"""What is still to come of a FastVideo run, from any step on. Its trainers need a GPU; the plan is plain arithmetic."""

from __future__ import annotations

import pytest

from wanshim.adapters.fastvideo.training_plan import TrainingPlan
from wanshim.core.training import GlobalSteps

STEPS = GlobalSteps(steps=12, processes=1, sequence_parallel=1, gradient_accumulation=1, batch_size=1)


def plan(validate_every: int = 3, checkpoint_every: int = 4) -> TrainingPlan:
    return TrainingPlan(
        steps=STEPS, output_path=".", rank=0, device="cpu", learning_rate=lambda: None,
        checkpoint_every=checkpoint_every, validate_every=validate_every, saves_last=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("done", "validations", "checkpoints"),
    [(0, 4, 4), (2, 4, 4), (3, 3, 4), (7, 2, 3), (8, 2, 2), (11, 1, 2), (12, 0, 1), (13, 0, 1)],
)
def test_resumed_run_counts_what_is_still_to_come(done: int, validations: int, checkpoints: int) -> None:
    assert (plan().validations(done), plan().checkpoints(done)) == (validations, checkpoints)


def test_run_that_never_validates_has_none_to_come() -> None:
    assert (plan(0, 0).validations(5), plan(0, 0).checkpoints(5)) == (0, 1)
