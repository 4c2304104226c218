from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanshim.core.training import GlobalSteps, StepAccounting
from wanshim.errors import SettingInvalid

COUNT = st.integers(1, 50)


@pytest.mark.parametrize(
    ("arguments", "micro", "optimizer"),
    [
        ({"samples": 5000, "processes": 2}, 2500, 2500),
        ({"samples": 170180, "processes": 2, "epochs": 5}, 425450, 425450),
        ({"samples": 5000}, 5000, 5000),
        ({"samples": 7, "processes": 2, "gradient_accumulation": 3, "epochs": 2}, 8, 4),
        ({"samples": 3, "repeat": 5, "processes": 4}, 4, 4),
        ({"samples": 7, "gradient_accumulation": 3, "epochs": 2, "groups_cross_epochs": True}, 14, 4),
        ({"samples": 10, "batch_size": 4, "processes": 2}, 2, 2),
    ],
    ids=["the guide's test run", "the guide's full run", "a split of two GPUs", "partial groups", "repeat",
         "groups over epochs", "batches"],
)  # fmt: skip
def test_steps_of_known_runs_are_counted(arguments: dict[str, int], micro: int, optimizer: int) -> None:
    steps = StepAccounting(**arguments)
    assert (steps.micro_steps, steps.optimizer_steps) == (micro, optimizer)


@given(COUNT, st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.integers(1, 7))
def test_steps_of_any_run_equal_those_of_a_loop(
    samples: int, repeat: int, epochs: int, processes: int, group: int
) -> None:
    micro = optimizer = 0
    made = [0]  # optimizer steps after each micro-step
    for _ in range(epochs):
        held = 0
        batches = math.ceil(samples * repeat / processes)
        for batch in range(1, batches + 1):
            micro, held = micro + 1, held + 1
            if held == group or batch == batches:
                optimizer, held = optimizer + 1, 0
            made.append(optimizer + bool(held))
    steps = StepAccounting(samples, repeat, epochs, processes, group)
    assert (steps.micro_steps, steps.optimizer_steps) == (micro, optimizer)
    assert [steps.optimizer_steps_in(lines) for lines in range(micro + 1)] == made  # with the group that is begun


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_count_that_is_none_is_refused_by_name(value: object) -> None:
    with pytest.raises(SettingInvalid, match="processes="):
        StepAccounting(10, processes=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("processes", "group", "data_parallel", "samples"),
    [(8, 1, 8, 96), (8, 4, 2, 24), (8, 8, 1, 12), (1, 1, 1, 12)],
)
def test_ranks_of_one_sequence_parallel_group_share_their_samples(
    processes: int, group: int, data_parallel: int, samples: int
) -> None:
    steps = GlobalSteps(100, processes, group, gradient_accumulation=3, batch_size=4)
    assert (steps.data_parallel, steps.samples_per_step) == (data_parallel, samples)
    assert (steps.micro_steps, steps.optimizer_steps, steps.recorded_steps) == (300, 100, 100)


def test_groups_that_do_not_divide_the_processes_are_refused() -> None:
    with pytest.raises(SettingInvalid, match="sequence_parallel=3"):
        GlobalSteps(10, processes=4, sequence_parallel=3)


def test_run_json_gets_what_went_in_and_every_count() -> None:
    run = StepAccounting(samples=7, repeat=2, epochs=3, processes=2, gradient_accumulation=4)
    assert run.optimizer_steps_per_epoch == 2
    assert run.to_dict() == {
        "samples": 7, "repeat": 2, "epochs": 3, "processes": 2, "gradient_accumulation": 4, "batch_size": 1,
        "groups_cross_epochs": False, "micro_steps_per_epoch": 7, "micro_steps": 21, "optimizer_steps": 6,
        "recorded_steps": 21, "recorded_group": 4,
    }  # fmt: skip


def test_run_json_of_a_trainer_with_global_steps_gets_every_count() -> None:
    run = GlobalSteps(steps=10, processes=8, sequence_parallel=2, gradient_accumulation=3, batch_size=2)
    assert run.to_dict() == {
        "steps": 10, "processes": 8, "sequence_parallel": 2, "gradient_accumulation": 3, "batch_size": 2,
        "recorded_group": 1, "data_parallel": 4, "samples_per_step": 24, "micro_steps": 30, "optimizer_steps": 10,
        "recorded_steps": 10,
    }  # fmt: skip


def test_trainer_that_is_told_nothing_else_is_one_process_with_one_sample_a_step() -> None:
    run = GlobalSteps(steps=10)
    assert (run.data_parallel, run.samples_per_step, run.micro_steps) == (1, 1, 10)


def test_trainer_with_global_steps_is_a_fixed_value_whose_lines_are_optimizer_steps() -> None:
    run = GlobalSteps(steps=10)
    with pytest.raises(FrozenInstanceError):
        run.steps = 20  # type: ignore[misc]
    with pytest.raises(TypeError, match="recorded_group"):
        GlobalSteps(steps=10, recorded_group=2)  # type: ignore[call-arg]
