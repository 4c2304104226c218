"""The run that is resumed is the run: the same samples, draws, losses and files as one that was never stopped."""

from __future__ import annotations

import argparse
import errno
import gc
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffsynth.core.data.unified_dataset import UnifiedDataset
from diffsynth.diffusion import ModelLogger, parsers, runner
from torch.optim.optimizer import register_optimizer_step_pre_hook

import wanshim
from tests.contract.diffsynth import resume_job, resume_runs
from tests.contract.diffsynth.prepared import Fork
from tests.contract.diffsynth.resume_job import Drawing, OwnGenerators, files, seen, train
from tests.contract.diffsynth.resume_runs import said
from tests.contract.diffsynth.training import Pipe, wan_pipe
from wanshim.adapters.diffsynth.resume import FEATURE, STEP
from wanshim.adapters.diffsynth.resuming import run as resume_run
from wanshim.adapters.diffsynth.resuming.identity import FILES, changes, files_of, samples_of
from wanshim.adapters.diffsynth.training_road import TrainingCall
from wanshim.core.resume import tree, writer
from wanshim.core.resume.state import RunState, read_state, write_state
from wanshim.errors import FeatureUnavailable, ResumeInvalid
from wanshim.settings import Settings

NAME = FEATURE.name
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _save_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the last state is on the disk: a due state never waits for one that is being written."""
    from wanshim.core.resume.writer import StateWriter

    monkeypatch.setenv("WANSHIM_RESUME", "auto")
    monkeypatch.setenv("WANSHIM_SAVE_EVERY", "1")
    monkeypatch.setattr(StateWriter, "busy", False)


def _takes(option: str) -> bool:
    return option in inspect.signature(runner.launch_training_task).parameters


def undisturbed(folder: Path, **job: Any) -> tuple[list[Any], dict[str, bytes]]:
    """Of DiffSynth alone."""
    wanshim.deactivate()
    train(folder, **job)
    return seen(folder, 0, 0), files(folder)


def note() -> str:
    return next(
        text for text in reversed(wanshim.report().row(NAME).notes) if " at step " in text or "from step" in text
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "at"),
    [
        ({}, 3),
        ({"accumulation": 3, "workers": 2, "save_steps": 2}, 11),  # groups of 3, 3 and 1 an epoch
        pytest.param({"workers": 2}, 9, marks=pytest.mark.sweep),
        pytest.param(  # the last batch of an epoch
            {"customized_optimizer": "torch.optim.RMSprop", "save_steps": 3}, 6, marks=pytest.mark.sweep
        ),
        pytest.param({"customized_optimizer": f"{resume_job.__name__}.Nested"}, 5, marks=pytest.mark.sweep),
    ],
)
def test_resumed_run_has_the_samples_draws_losses_and_files_of_the_undisturbed_one(
    tmp_path: Path, job: dict[str, Any], at: int
) -> None:
    if "customized_optimizer" in job and not _takes("customized_optimizer"):
        pytest.skip("this release has AdamW alone")
    expected, lora = undisturbed(tmp_path / "whole", **job)
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "out", at=at, end="error", **job)
    lost = at % job.get("accumulation", 1) if at < 7 else (at - 7) % job.get("accumulation", 1)
    train(tmp_path / "out", seed=99, attempt=1, **job)
    resumed = seen(tmp_path / "out", 0, 1)
    assert len(resumed) == 14 - at + lost
    assert seen(tmp_path / "out", 0, 0) == expected[:at]
    assert resumed == expected[at - lost :]
    assert files(tmp_path / "out") == lora
    assert note().startswith("goes on from step ")
    assert str(wanshim.report()).splitlines()[0] == f"{NAME}: {note()}"


@pytest.mark.parametrize(
    "variables",
    [{}, pytest.param({"WANSHIM_COMPUTE": "int8"}, marks=pytest.mark.slow)],
    ids=["alone", "in eight bits"],
)
def test_run_whose_memory_nobody_plans_is_told_no_peak_and_looks_at_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wanshim.activate()
    train(tmp_path / "out", epochs=1)
    rows = wanshim.report().rows
    said = "\n".join(text for row in rows for text in row.notes)
    assert "begins at step 0" in said
    assert ("multiply in int8" in said) == bool(variables)
    assert "predicted" not in said
    assert "assumed" not in said


OVER_TWO = {"WANSHIM_DEVICES": "cpu,cpu"}
KEPT_IN_INT8 = {"WANSHIM_KEEP": "blocks", "WANSHIM_COMPUTE": "int8", "WANSHIM_PLAN": "auto"}
KEEP_ATTENTION = {"WANSHIM_KEEP": "attention", "WANSHIM_OFFLOAD": "on"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "variables", "job", "says"),
    [
        pytest.param(1, KEEP_ATTENTION, {}, "attentions kept", marks=pytest.mark.sweep),
        pytest.param(1, KEPT_IN_INT8, {"workers": 2}, "multiply in int8", marks=pytest.mark.sweep),
        (1, {"WANSHIM_PLAN": "stream", "WANSHIM_OFFLOAD": "on"}, {"accumulation": 2, "sizes": {"layers": 4}},
         "streaming 2 of 4"),
        pytest.param(1, OVER_TWO | {"WANSHIM_BASE": "float8"}, {}, "float8_e4m3fn 86 %", marks=pytest.mark.sweep),
        pytest.param(1, OVER_TWO | {"WANSHIM_BASE": "int8"}, {}, "int8 86 %", marks=pytest.mark.sweep),
        pytest.param(2, {"WANSHIM_PLAN": "sequence", "WANSHIM_BASE": "int8"}, {}, "are stored as int8",
                     marks=pytest.mark.sweep),
        (1, OVER_TWO | {"WANSHIM_PLAN": "pipeline"}, {"accumulation": 3}, "micro-batches in a pipeline of 2"),
        (2, {"WANSHIM_PLAN": "sequence"}, {}, "the tokens of each sample over 2"),
        pytest.param(4, {"WANSHIM_PLAN": "sequence:2"}, {}, "2 groups", marks=pytest.mark.sweep),
        pytest.param(4, {}, {"samples": 15}, "goes on", marks=pytest.mark.sweep),
        pytest.param(2, {"WANSHIM_PLAN": "stream"}, {"sizes": {"layers": 4}}, "streaming 2 of 4",
                     marks=pytest.mark.sweep),
        pytest.param(1, {"WANSHIM_COMPILE": "1"}, {}, "graphs compiled", marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_under_every_plan_the_resumed_run_is_the_run(
    tmp_path: Path, processes: int, variables: dict[str, str], job: dict[str, Any], says: str
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert not any(resume_runs.start(whole, processes, variables, **job)), said(whole)
    resume = {**variables, "WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"}
    assert resume_runs.start(out, processes, resume, at=3, end="SIGTERM", only=0, **job) == [75] * processes, said(out)
    assert not any(resume_runs.start(out, processes, resume, attempt=1, seed=99, **job)), said(out, 1)
    assert says in said(out, 1)
    assert "goes on from step" in said(out, 1)
    for rank in range(processes):
        expected, resumed = seen(whole, rank, 0), seen(out, rank, 1)
        assert 0 < len(resumed) < len(expected)
        assert resumed == expected[-len(resumed) :]
    assert files(out) == files(whole)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("workers", "at"), [(0, 4), pytest.param(2, 4, marks=pytest.mark.sweep), (2, 9)])
def test_generators_that_the_dataset_holds_go_on_where_they_were(tmp_path: Path, workers: int, at: int) -> None:
    expected, lora = undisturbed(tmp_path / "whole", dataset=OwnGenerators(7), workers=workers)
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "out", at=at, end="error", dataset=OwnGenerators(7), workers=workers)
    again = OwnGenerators(7)
    again.torch.manual_seed(99)
    again.crops[0].seed(99)
    train(tmp_path / "out", seed=99, attempt=1, dataset=again, workers=workers)
    assert seen(tmp_path / "out", 0, 1) == expected[at:]
    assert files(tmp_path / "out") == lora


class Counting(resume_job.Job):
    """Draws from a generator of its own, and counts in plain attributes."""

    steps = 0

    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.draws = SimpleNamespace(own=[np.random.default_rng(7)])
        self._by_sample, self.started = {}, time.time()

    def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
        self.steps += 1
        self._by_sample[data["number"]] = self._by_sample.get(data["number"], 0) + 1
        noise = [*data["noise"], self.draws.own[0].random(), self.steps, self._by_sample[data["number"]]]
        return super().forward({**data, "noise": noise}, inputs) * (1 + self.draws.own[0].random())


class Logging(resume_job.Logger):
    """Of which a generator and a list outlive a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.draws, self.drawn = random.Random(3), folder / "drawn"
        self.values: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self.values.append(self.draws.random())
        self.drawn.write_text(json.dumps(self.values))


def test_generators_and_counters_of_module_and_logger_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_job, "Job", Counting)
    monkeypatch.setattr(resume_job, "Logger", Logging)
    expected, lora = undisturbed(tmp_path / "whole")
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "out", at=4, end="error")
    train(tmp_path / "out", seed=99, attempt=1)
    assert seen(tmp_path / "out", 0, 1) == expected[4:]
    assert files(tmp_path / "out") == lora
    assert (tmp_path / "out" / "drawn").read_text() == (tmp_path / "whole" / "drawn").read_text()


def test_generator_that_the_module_makes_while_it_trains_and_a_long_list_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(resume_job.Job):
        def forward(self, data: Any, inputs: Any = None) -> torch.Tensor:
            self.late, self.history = {"own": random.Random(1)}, [0] * tree.MOST_TEXT
            return super().forward(data, inputs)

    monkeypatch.setattr(resume_job, "Job", Late)
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=1, samples=2)
    said = {note for note in wanshim.report().row(NAME).notes if "no part of the state" in note}
    assert said == {f"no part of the state, and begins anew: {name} of Late" for name in ("history", "late", "seen")}


@pytest.mark.skipif(
    "enable_csv_log" not in inspect.signature(ModelLogger).parameters, reason="this release writes no loss.csv"
)
def test_logger_of_a_resumed_run_opens_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DiffSynth's own says in an attribute that it has."""
    monkeypatch.setattr(resume_job, "Logger", lambda folder: ModelLogger(str(folder), enable_csv_log=True))
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=4, end="error")
    train(tmp_path, attempt=1)
    steps = [line.split(",")[0] for line in (tmp_path / "loss.csv").read_text().splitlines()]
    assert steps == ["step", *map(str, range(1, 15))]


class Staged(resume_job.Logger):
    """Freezes a part of what is trained, and later trains another."""

    def on_step_end(self, accelerator: Any, model: Any, save_steps: Any = None, **kwargs: Any) -> None:
        super().on_step_end(accelerator, model, save_steps, **kwargs)
        for name, weight in model.named_parameters():
            if self.num_steps == 2 and "lora_A" in name and ".0." in name:
                weight.requires_grad_(False)
            if self.num_steps == 3 and "patch_embedding.bias" in name:
                weight.requires_grad_(True)


def test_weights_that_are_frozen_or_unfrozen_before_the_state_are_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_job, "Logger", Staged)
    expected, lora = undisturbed(tmp_path / "whole")
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "out", at=4, end="error")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "out", seed=99, attempt=1, at=2, end="error")
    train(tmp_path / "out", seed=99, attempt=2)
    assert [*seen(tmp_path / "out", 0, 1), *seen(tmp_path / "out", 0, 2)] == expected[4:]
    assert files(tmp_path / "out") == lora
    path = max((tmp_path / "out" / "training_state" / "run-1").glob("step-*"))
    assert "model.pipe.dit.patch_embedding.bias" in read_state(path).tensors


def test_state_without_a_weight_that_is_trained_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a release that left out what was frozen by then."""
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    run = tmp_path / "training_state" / "run-1"
    state = read_state(max(run.glob("step-*")))
    name = next(name for name in state.tensors if name.startswith("model."))
    write_state(run, 3, RunState(state.facts, {n: tensor for n, tensor in state.tensors.items() if n != name}))
    lacking = re.escape(f"The state in {run} lacks {name.removeprefix('model.')}")
    with pytest.raises(ResumeInvalid, match=f"{lacking}.*Expected each weight .*WANSHIM_RESUME=new begins"):
        train(tmp_path, attempt=1)


@pytest.mark.slow
def test_state_of_an_earlier_release_goes_on(tmp_path: Path) -> None:
    expected, lora = undisturbed(tmp_path / "whole")
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "out", at=3, end="error")
    run = tmp_path / "out" / "training_state" / "run-1"
    state = read_state(max(run.glob("step-*")))
    del state.facts["frozen"], state.facts["ranks"][0]["module"], state.facts["identity"]["files_of_dataset"]
    write_state(run, 3, state)
    train(tmp_path / "out", seed=99, attempt=1)
    assert seen(tmp_path / "out", 0, 1) == expected[3:]
    assert files(tmp_path / "out") == lora


class Shuffled(torch.utils.data.Sampler[int]):
    """In an order that it draws from a generator of its own."""

    def __init__(self, count: int) -> None:
        self.count, self.draws = count, random.Random(4)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(self.draws.sample(range(self.count), self.count))


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 9])
def test_generator_that_a_sampler_of_the_user_holds_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    class Loader(torch.utils.data.DataLoader[Any]):
        def __init__(self, dataset: Any, shuffle: bool, **options: Any) -> None:
            super().__init__(dataset, sampler=Shuffled(len(dataset)), **options)

    monkeypatch.setattr(torch.utils.data, "DataLoader", Loader)
    expected, lora = undisturbed(tmp_path / "whole")
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "out", at=at, end="error")
    train(tmp_path / "out", seed=99, attempt=1)
    assert seen(tmp_path / "out", 0, 1) == expected[at:]
    assert files(tmp_path / "out") == lora


def test_workers_that_outlive_an_epoch_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader(torch.utils.data.DataLoader[Any]):
        def __init__(self, dataset: Any, **options: Any) -> None:
            super().__init__(dataset, persistent_workers=True, **options)

    monkeypatch.setattr(torch.utils.data, "DataLoader", Loader)
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(FeatureUnavailable, match="Leave persistent_workers out, or unset WANSHIM_RESUME"):
        train(tmp_path, workers=2)


def test_run_that_has_ended_trains_nothing_and_leaves_the_same_files(tmp_path: Path) -> None:
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=1)
    lora = files(tmp_path)
    train(tmp_path, epochs=1, seed=99, attempt=1)
    assert seen(tmp_path, 0, 1) == []
    assert files(tmp_path) == lora
    assert note() == f"has ended at step 7, and trains nothing: {tmp_path}/training_state/run-1"


@pytest.mark.slow
def test_run_that_has_passed_its_last_epoch_has_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script trains next begins a run of its own."""
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=2)
    monkeypatch.setenv("WANSHIM_RESUME", "auto,+num_epochs")
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=1, calls=2, attempt=1)
    notes = wanshim.report().row(NAME).notes
    assert any(said.startswith("has ended at step 14, and trains nothing, with another num_epochs: ") for said in notes)
    assert len(seen(tmp_path, 0, 1)) == 7


@pytest.mark.parametrize(("resume", "said"), [("auto", ""), ("new", " with WANSHIM_RESUME=auto")])
def test_run_that_fails_says_last_what_goes_on_from_which_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, said: str
) -> None:
    monkeypatch.setenv("WANSHIM_RESUME", resume)
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    row = wanshim.report().row(NAME)
    state = f"goes on from the state of step 3 in {tmp_path}/training_state/run-1"
    assert row.headline == row.notes[-1] == f"the same command{said} {state}"


def test_run_whose_last_file_is_not_saved_has_not_ended(tmp_path: Path) -> None:
    """As on a full disk: it says how to go on, and so it does, also in the process that failed."""
    wanshim.activate(f"none,{NAME}")
    (tmp_path / "epoch-0.safetensors").mkdir()
    with pytest.raises(Exception, match="directory"):
        train(tmp_path, epochs=1)
    state = f"goes on from the state of step 7 in {tmp_path}/training_state/run-1"
    assert wanshim.report().row(NAME).headline == f"the same command {state}"
    (tmp_path / "epoch-0.safetensors").rmdir()
    count = dict(resume_run.ended)
    train(tmp_path, epochs=1, attempt=1)
    assert not any(count.values())
    assert seen(tmp_path, 0, 1) == []
    assert (tmp_path / "epoch-0.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("at", "left"), [(0, 14), (7, 7)])
def test_run_that_fails_before_it_saves_names_the_state_that_it_began_from(tmp_path: Path, at: int, left: int) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=at, end="error")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=0, end="error", attempt=1)
    state = "goes on from the state of step 7" if at else "no state was saved: the same command begins at step 0"
    assert state in wanshim.report().row(NAME).headline
    train(tmp_path, attempt=2)
    assert len(seen(tmp_path, 0, 2)) == left


@pytest.mark.parametrize("named", [True, False])
def test_file_in_place_of_the_folder_of_states_stops_the_start_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    file = tmp_path / "training_state"
    file.write_text("mine")
    if named:
        monkeypatch.setenv("WANSHIM_RESUME", str(file))
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(ResumeInvalid, match=f"{file}.*: Not a directory. Expected a folder .* WANSHIM_RESUME=./states"):
        train(tmp_path)
    assert seen(tmp_path, 0, 0) == []
    assert file.read_text() == "mine"


def test_state_in_a_folder_beside_the_run_s_own_is_named_and_a_file_there_is_none(tmp_path: Path) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "monday", at=3, end="error")
    (tmp_path / "tuesday").mkdir()
    (tmp_path / "tuesday" / "training_state").write_text("mine")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "wednesday", at=1, end="error")
    assert f"there is one in {tmp_path / 'monday'}," in "\n".join(wanshim.report().row(NAME).notes)


def test_folder_beside_the_run_s_own_is_not_named_if_its_run_has_ended_or_is_another(tmp_path: Path) -> None:
    """Such as the stage before it in one script."""
    wanshim.activate(f"none,{NAME}")
    train(tmp_path / "ended", epochs=1)
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "another", epochs=5, at=3, end="error")
    train(tmp_path / "own", epochs=1)
    notes = "\n".join(wanshim.report().row(NAME).notes)
    assert f"begins at step 0: there is no state in {tmp_path}/own/" in notes
    assert "there is one in" not in notes


@pytest.mark.sweep
@pytest.mark.slow
def test_run_whose_states_are_all_damaged_stops_and_begins_beside_them_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    run = tmp_path / "training_state" / "run-1"
    states = sorted(run.glob("step-*"))
    for path in states:
        os.truncate(path, 500)
    with pytest.raises(ResumeInvalid, match=f"No state in {run} can be read.*; WANSHIM_RESUME=new begins"):
        train(tmp_path, attempt=1)
    monkeypatch.setenv("WANSHIM_RESUME", "new")
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, attempt=1)
    assert len(seen(tmp_path, 0, 1)) == 14
    assert sorted(run.glob("step-*")) == states


@pytest.mark.slow
@pytest.mark.parametrize("at", [None, 4, *(pytest.param(at, marks=pytest.mark.sweep) for at in (2, 5))])
def test_script_that_trains_twice_into_one_folder_trains_both_and_goes_on_in_either(
    tmp_path: Path, at: int | None
) -> None:
    expected, lora = undisturbed(tmp_path / "whole", epochs=1, samples=4, calls=2)
    wanshim.activate(f"none,{NAME}")
    folder = tmp_path / "resumed"
    if at is not None:
        with pytest.raises(torch.OutOfMemoryError):
            train(folder, epochs=1, samples=4, calls=2, at=at, end="error")
    train(folder, epochs=1, samples=4, calls=2, seed=99 if at is not None else 5, attempt=1)
    assert seen(folder, 0, 0) + seen(folder, 0, 1) == expected
    assert files(folder) == lora


@pytest.mark.sweep
@pytest.mark.slow
def test_what_the_hint_says_goes_on_from_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANSHIM_RESUME", "./states")
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    with pytest.raises(ResumeInvalid) as raised:
        train(tmp_path, attempt=1, learning_rate=2e-2)
    found = re.search(r"WANSHIM_RESUME=(\S+) goes on nevertheless", str(raised.value))
    assert found is not None
    monkeypatch.setenv("WANSHIM_RESUME", found[1])
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, attempt=2, learning_rate=2e-2)
    assert len(seen(tmp_path, 0, 2)) == 11


@pytest.mark.slow
def test_another_learning_rate_stops_with_a_table_and_goes_on_where_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    states = [path.read_bytes() for path in sorted(tmp_path.glob("training_state/run-1/*"))]
    with pytest.raises(ResumeInvalid, match=r"learning_rate +0\.01 +0\.02") as raised:
        train(tmp_path, attempt=1, learning_rate=2e-2)
    assert "WANSHIM_RESUME=auto,+learning_rate goes on nevertheless" in str(raised.value)
    with pytest.raises(ResumeInvalid, match="7 samples of Drawing") as raised:
        train(tmp_path, attempt=1, samples=8)
    assert [path.read_bytes() for path in sorted(tmp_path.glob("training_state/run-1/*"))] == states
    monkeypatch.setenv("WANSHIM_RESUME", "auto,+learning_rate")
    wanshim.activate(f"none,{NAME}")
    rates: list[float] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        train(tmp_path, attempt=2, learning_rate=2e-2)
    finally:
        handle.remove()
    assert len(seen(tmp_path, 0, 2)) == 11
    assert rates[0] == pytest.approx(2e-2 / 3)  # ConstantLR: a third for the first five steps
    assert rates[-1] == pytest.approx(2e-2)


def parsed(folder: Path, *more: str) -> argparse.Namespace:
    parser = parsers.add_output_config(argparse.ArgumentParser())
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    return parser.parse_args(["--output_path", str(folder), *more])


def test_other_arguments_stop_the_start_where_the_script_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanshim.activate(f"none,{NAME}")
    parsed(tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error", learning_rate=3e-2)  # the script changes what was read
    assert parsed(tmp_path).learning_rate == 1e-2
    assert parsed(tmp_path / "other", "--learning_rate", "2e-2").learning_rate == 2e-2
    with pytest.raises(ResumeInvalid, match=r"learning_rate +0\.01 +0\.02") as raised:
        parsed(tmp_path, "--learning_rate", "2e-2")
    assert "WANSHIM_RESUME=auto,+learning_rate goes on nevertheless" in str(raised.value)
    for accepting in ("auto,+learning_rate", "new"):
        monkeypatch.setenv("WANSHIM_RESUME", accepting)
        wanshim.activate(f"none,{NAME}")
        assert parsed(tmp_path, "--learning_rate", "2e-2").learning_rate == 2e-2
    monkeypatch.setenv("WANSHIM_RESUME", "auto")
    wanshim.activate(f"none,{NAME}")
    wanshim.deactivate()
    assert parsed(tmp_path, "--learning_rate", "2e-2").learning_rate == 2e-2


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("at", "rate"), [(3, 2e-2 / 3), (9, 2e-2)], ids=["warming up", "warmed up"])
def test_learning_rate_0_is_replaced_by_the_accepted_one_where_the_schedule_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, rate: float
) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=at, end="error", learning_rate=0.0)
    monkeypatch.setenv("WANSHIM_RESUME", "auto,+learning_rate")
    wanshim.activate(f"none,{NAME}")
    rates: list[float] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        train(tmp_path, attempt=1, learning_rate=2e-2)
    finally:
        handle.remove()
    assert rates[0] == pytest.approx(rate)
    assert rates[-1] == pytest.approx(2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("alive", [True, False], ids=["stopped", "killed"])
def test_another_process_that_trains_the_run_is_named_and_one_that_was_killed_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, alive: bool
) -> None:
    variables = {"WANSHIM_FEATURES": f"none,{NAME}", "WANSHIM_RESUME": "auto"}
    other = Fork(resume_runs._train, tmp_path / "said", {**variables, "WANSHIM_SAVE_EVERY": "1"}, tmp_path, {
        "at": 3, "end": "SIGSTOP" if alive else "SIGKILL", "workers": 2,
    }, "resume_job")  # fmt: skip
    status = Path(f"/proc/{other.pid}/status")
    while not other.has_ended() and "(stopped)" not in status.read_text():
        time.sleep(0.02)
    states = len(list((tmp_path / "training_state" / "run-1").glob("step-*")))  # a busy host may have none yet
    wanshim.activate(f"none,{NAME}")
    try:
        train(tmp_path, attempt=1, workers=2)
    finally:
        other.send(signal.SIGKILL)
    named = [line for line in caplog.messages if line.startswith(f"wanshim: process {other.pid} on ")]
    assert [line.endswith(f" trains this run too: {tmp_path}/training_state/run-1") for line in named] == [True] * alive
    trained = len(seen(tmp_path, 0, 1))
    assert 11 <= trained < 14 if states else trained == 14  # it goes on from the last state that was on the disk


def test_another_mixed_precision_stops_the_start(tmp_path: Path) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    with pytest.raises(ResumeInvalid, match=r"\n +mixed_precision +no +bf16\n"):
        train(tmp_path, attempt=1, precision="bf16")


def other_base(device: str, layers: int) -> Pipe:
    pipe = wan_pipe(device, layers=layers)
    with torch.no_grad():
        pipe.dit.patch_embedding.weight.add_(1)
    return pipe


def other_rank(device: str, layers: int) -> Pipe:
    pipe = wan_pipe(device, layers=layers)
    for module in pipe.dit.modules():
        for weights in (getattr(module, "lora_A", {}), getattr(module, "lora_B", {})):
            for layer in weights.values():
                layer.weight = torch.nn.Parameter(torch.cat([layer.weight] * 2, int(weights is module.lora_B)))
    return pipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "name", "accepted"),
    [(other_base, "base_model", True), (other_rank, "trained_weights", False)],
    ids=["another base model", "another rank of LoRA"],
)
def test_other_weights_stop_the_start_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[..., Pipe], name: str, accepted: bool
) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    monkeypatch.setattr(resume_job, "wan_pipe", made)
    with pytest.raises(ResumeInvalid, match=f"\n +{name} ") as raised:
        train(tmp_path, attempt=1)
    assert (f"WANSHIM_RESUME=auto,+{name} goes on nevertheless" in str(raised.value)) is accepted
    assert "WANSHIM_RESUME=new begins a run of its own" in str(raised.value)
    monkeypatch.setenv("WANSHIM_RESUME", f"auto,+{name}")
    wanshim.activate(f"none,{NAME}")
    if accepted:
        train(tmp_path, attempt=2)
        assert len(seen(tmp_path, 0, 2)) == 11
    else:
        with pytest.raises(ResumeInvalid, match=name):
            train(tmp_path, attempt=2)


@pytest.mark.sweep
@pytest.mark.slow
def test_dataset_with_other_files_stops_the_start_and_begins_its_epoch_where_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(folder: str) -> Drawing:
        samples = Drawing(7)
        samples.data = [{"video": f"{folder}/{number}.mp4"} for number in range(7)]  # as DiffSynth's UnifiedDataset
        return samples

    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error", dataset=of("one"))
    with pytest.raises(ResumeInvalid, match="7 samples of Drawing, ") as raised:
        train(tmp_path, attempt=1, dataset=of("other"))
    assert "WANSHIM_RESUME=auto,+dataset goes on nevertheless" in str(raised.value)
    monkeypatch.setenv("WANSHIM_RESUME", "auto,+dataset")
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, attempt=2, dataset=of("other"))
    assert len(seen(tmp_path, 0, 2)) == 14


def test_samples_that_are_encoded_anew_into_the_same_files_are_another_dataset(tmp_path: Path) -> None:
    def encoded(caption: float) -> str:
        for number in range(70):
            torch.save(({"number": number}, {"context": torch.full((4,), caption)}, {}), tmp_path / f"{number}.pth")
        return samples_of(UnifiedDataset(str(tmp_path)))

    first = encoded(1.0)
    assert first.startswith("70 samples of UnifiedDataset, ")
    assert encoded(1.0) == first
    assert encoded(2.0) != first


def test_videos_that_are_replaced_are_seen_and_states_of_an_earlier_release_do_not_know_them(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"video": "a.mp4", "prompt": "b.mp4"}, {"video": ["c.png", 1]}]))
    for name in ("a.mp4", "b.mp4", "c.png"):
        (tmp_path / name).write_bytes(b"12345")
    dataset = UnifiedDataset(str(tmp_path), str(tmp_path / "rows.json"), data_file_keys=("video", "image"))
    first = files_of(dataset)
    assert first.startswith("2 files, ")
    (tmp_path / "b.mp4").write_bytes(b"a caption that is a file's name, too")
    assert files_of(dataset) == first
    (tmp_path / "c.png").write_bytes(b"another")
    second = files_of(dataset)
    assert changes({FILES: first, "seed": 1}, {FILES: second, "seed": 1}) == {FILES: (first, second)}
    assert changes({"seed": 1}, {FILES: second, "seed": 2}) == {"seed": (1, 2)}


@pytest.mark.parametrize("kept", [[{"a": 1}], [torch.ones(1)], {"a": 1}, (1, 2), np.ones(3), [], None], ids=repr)
def test_dataset_with_samples_in_memory_is_told_apart_by_its_rows(kept: object) -> None:
    class Own(list):  # type: ignore[type-arg]
        cached_data = kept

    assert samples_of(Own([1])) != samples_of(Own([1, 2]))


@pytest.mark.slow
def test_epoch_that_has_ended_is_not_trained_again_with_another_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with samples that are added after a run, for one epoch more."""
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=1)
    lora = files(tmp_path)
    monkeypatch.setenv("WANSHIM_RESUME", "auto,+dataset,+num_epochs")
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=2, samples=8, attempt=1)
    assert len(seen(tmp_path, 0, 1)) == 8
    assert files(tmp_path).keys() - lora.keys() == {"epoch-1.safetensors"}
    assert files(tmp_path)["epoch-0.safetensors"] == lora["epoch-0.safetensors"]


def test_samples_a_step_are_not_changed_whatever_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    monkeypatch.setenv("WANSHIM_RESUME", "auto,+samples_per_step")
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(ResumeInvalid, match="2: 1 x 2 accumulated") as raised:
        train(tmp_path, attempt=1, accumulation=2)
    assert "--gradient_accumulation_steps 1" in str(raised.value)


@pytest.mark.sweep
@pytest.mark.slow
def test_new_begins_beside_the_old_run_which_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=1)
    old = {path.name: path.read_bytes() for path in tmp_path.glob("training_state/run-1/*")}
    monkeypatch.setenv("WANSHIM_RESUME", "new")
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=1, attempt=1)
    assert len(seen(tmp_path, 0, 1)) == 7
    assert {path.name: path.read_bytes() for path in tmp_path.glob("training_state/run-1/*")} == old
    assert sorted(path.name for path in tmp_path.glob("training_state/*")) == ["run-1", "run-2"]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.sweep)])
def test_run_of_one_sample_a_step_goes_on_on_other_gpus(tmp_path: Path, first: int, then: int) -> None:
    """Over two ranks, then in one process, and the other way round: the same samples and draws, up to rounding."""
    plans = {1: {}, 2: {"WANSHIM_PLAN": "sequence"}}
    resume = {"WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"}
    expected, _ = undisturbed(tmp_path / "whole")
    ends = resume_runs.start(tmp_path, first, {**plans[first], **resume}, at=8, end="SIGTERM", only=0)
    assert ends == [75] * first, said(tmp_path)
    assert not any(resume_runs.start(tmp_path, then, {**plans[then], **resume}, attempt=1, seed=99)), said(tmp_path, 1)
    resumed = seen(tmp_path, 0, 1)
    assert [line[:2] for line in resumed] == [line[:2] for line in expected[-len(resumed) :]]
    losses = torch.tensor([[line[2] for line in lines] for lines in (resumed, expected[-len(resumed) :])])
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
    assert "equal to it up to rounding" in said(tmp_path, 1)


@pytest.mark.slow
def test_fewer_processes_that_would_change_the_samples_of_a_step_are_refused_with_the_command(
    tmp_path: Path, of_two: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(of_two, out)
    assert start(out, attempt=1) == [1]
    found = said(out, 1)
    assert re.search("samples_per_step +2: 2 x 1 accumulated +1: 1 x 1 accumulated", found)
    assert "accelerate launch --num_processes 2) and --gradient_accumulation_steps 1" in found


@pytest.mark.parametrize("engine", ["DeepSpeed", "FSDP"])
def test_engine_of_accelerate_is_refused_when_wanshim_is_activated(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """As in a process of `accelerate launch`, before it has loaded a model."""
    monkeypatch.setenv(f"ACCELERATE_USE_{engine.upper()}", "true")
    monkeypatch.setenv("LOCAL_RANK", "0")
    expected = rf"{engine} \(--use_{engine.lower()}, .*\) and WANSHIM_RESUME each keep parameters and optimizer: leave"
    with pytest.raises(FeatureUnavailable, match=expected):
        wanshim.activate()
    monkeypatch.setenv("WANSHIM_RESUME", "off")
    wanshim.activate()


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_what_shards_parameters_is_refused_by_name(kind: str) -> None:
    """On a double of accelerate's: neither starts in one process without a GPU."""
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(name=kind))
    call = TrainingCall(accelerator=accelerator, model=None, logger=None, dataset=None, options={}, script=None)
    assert STEP.refusal(call, Settings()) == f"{kind} keeps parameters and optimizer itself"


def test_dataset_that_is_iterated_over_is_refused_by_name(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        load_from_cache = False

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    wanshim.activate(f"none,{NAME}")
    with pytest.raises(FeatureUnavailable, match="WANSHIM_RESUME is unavailable here: Stream is iterated over"):
        train(tmp_path, dataset=Stream())


def test_optimizer_that_cannot_be_saved_ends_the_run_after_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["seen"] = {1, 2}
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Odd)
    monkeypatch.setenv("WANSHIM_SAVE_EVERY", "10m")
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(ResumeInvalid, match=r"optimizer\.state\.0\.seen is a set"):
        train(tmp_path)
    assert len(seen(tmp_path, 0, 0)) == 1


def test_full_collection_comes_in_the_first_step_and_in_no_step_that_saves(tmp_path: Path) -> None:
    made: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            made.append(len(seen(tmp_path, 0, 0)))

    wanshim.activate(f"none,{NAME}")
    gc.callbacks.append(note)
    gc.disable()  # what the run asks for, and nothing else
    try:
        train(tmp_path)
    finally:
        gc.enable()
        gc.callbacks.remove(note)
    assert made == [1]


@pytest.mark.skipif(not _takes("enable_model_cpu_offload"), reason="this release has no such option")
def test_cpu_offload_of_diffsynth_is_refused_by_name(tmp_path: Path) -> None:
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(FeatureUnavailable, match="--enable_model_cpu_offload moves the trained weights"):
        train(tmp_path, enable_model_cpu_offload=True)


class Averaging(resume_job.Logger):
    """Keeps an average of the weights."""

    average: dict[str, torch.Tensor] | None = None

    def on_step_end(self, accelerator: Any, model: Any, save_steps: Any = None, **kwargs: Any) -> None:
        super().on_step_end(accelerator, model, save_steps, **kwargs)
        now = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
        before = self.average or now
        self.average = {name: before[name].lerp(weight, 0.1) for name, weight in now.items()}


@pytest.mark.parametrize("logger", [Averaging, resume_job.Logger])
def test_tensors_that_the_script_keeps_itself_are_named_as_no_part_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: type[resume_job.Logger]
) -> None:
    monkeypatch.setattr(resume_job, "Logger", logger)
    wanshim.activate(f"none,{NAME}")
    train(tmp_path, epochs=1, samples=2)
    said = [line for line in str(wanshim.report()).splitlines() if "no part of the state" in line]
    assert said[:1] == [f"{NAME}: no part of the state, and begins anew: average of Averaging"] * (logger is Averaging)


@pytest.mark.sweep
@pytest.mark.slow
def test_progress_log_goes_on_at_the_resumed_batch(tmp_path: Path) -> None:
    wanshim.activate(f"none,{NAME},diffsynth.progress")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, at=3, end="error")
    train(tmp_path, attempt=1)
    (log,) = tmp_path.glob("training_logs/*/rank-00000.*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["done"] for line in lines if line.get("event") == "start"] == [0, 3]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 15))


def start(folder: Path, processes: int = 1, **job: Any) -> list[int]:
    variables = {"WANSHIM_FEATURES": f"none,{NAME}", "WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"}
    return resume_runs.start(folder, processes, variables, **job)


@pytest.mark.slow
def test_run_that_is_asked_to_end_with_a_full_disk_says_that_its_state_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state = writer.write_state

    def full(run: Path, step: int, state: RunState) -> Path:
        if step > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_state(run, step, state)

    monkeypatch.setattr(writer, "write_state", full)
    wanshim.activate(f"none,{NAME}")
    with pytest.raises(SystemExit):
        train(tmp_path, at=3, end="SIGTERM")
    assert note() == "ends at step 4, asked by SIGTERM: its state is not saved"
    monkeypatch.setattr(writer, "write_state", write_state)
    train(tmp_path, attempt=1)
    assert len(seen(tmp_path, 0, 1)) == 12


def test_signal_does_not_end_a_run_that_failed_before_its_last_state_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun sends it when another rank has failed."""
    write_state = writer.write_state

    def asked(run: Path, step: int, state: RunState) -> Path:
        if step == 3:
            time.sleep(0.5)  # the run has failed by then
            os.kill(os.getpid(), signal.SIGTERM)
        return write_state(run, step, state)

    monkeypatch.setattr(writer, "write_state", asked)
    wanshim.activate(f"none,{NAME}")
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))  # in place of the process's end
    try:
        with pytest.raises(torch.OutOfMemoryError):
            train(tmp_path, at=3, end="error")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not ended
    assert "from the state of step 3 " in wanshim.report().row(NAME).headline


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "more"),
    [
        ("SIGKILL", -signal.SIGKILL, 0),
        ("SIGTERM", 75, 1),
        pytest.param("SIGINT", -signal.SIGINT, 1, marks=pytest.mark.sweep),
    ],
)
def test_signal_ends_a_run_that_goes_on_as_if_it_had_not(tmp_path: Path, end: str, status: int, more: int) -> None:
    """SIGTERM and ctrl-C: after the step that they came in, with its state saved. SIGKILL: at once."""
    expected, lora = undisturbed(tmp_path / "whole")
    out = tmp_path / "out"
    assert start(out, at=9, end=end) == [status], said(out)
    assert len(seen(out, 0, 0)) == 9 + more
    assert start(out, attempt=1, seed=99) == [0], said(out, 1)
    resumed = seen(out, 0, 1)
    assert resumed == expected[-len(resumed) :]
    assert len(resumed) == 5 - more if more else 5 <= len(resumed) <= 7
    assert files(out) == lora


@pytest.mark.sweep
@pytest.mark.slow
def test_sample_that_a_worker_cannot_load_ends_the_run(tmp_path: Path) -> None:
    """The traceback holds the loader's iterator, and so its workers, until the process exits."""
    job = json.dumps({"workers": 2, "broken": True})
    command = [sys.executable, "-m", "wanshim", "run", "--", sys.executable, "-m", resume_job.__name__]
    variables = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path), job], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "OSError: moov atom not found" in done.stderr
    assert "the same command goes on from the state of step" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = tmp_path_factory.mktemp("two")
    assert start(whole, 2) == [0, 0], said(whole)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "only", "at"), [pytest.param("SIGKILL", 1, 5, marks=pytest.mark.sweep), ("SIGUSR1", 0, 2)]
)
def test_two_ddp_processes_go_on_with_their_shuffle_and_draws(
    tmp_path: Path, of_two: Path, end: str, only: int, at: int
) -> None:
    """7 samples over 2 processes, 4 a process and epoch. One process is asked, both end at the epoch's last step."""
    ends = start(tmp_path, 2, at=at, end=end, only=only)
    assert ends == [75, 75] if end == "SIGUSR1" else ends[1] == -signal.SIGKILL, said(tmp_path)
    last = at if end == "SIGKILL" else at + 2
    assert f"the same command goes on from the state of step {last} in " in said(tmp_path)
    assert start(tmp_path, 2, attempt=1, seed=99) == [0, 0], said(tmp_path, 1)
    for rank in (0, 1):
        expected, resumed = seen(of_two, rank, 0), seen(tmp_path, rank, 1)
        assert 0 < len(resumed) <= 4
        assert resumed == expected[-len(resumed) :]
    assert files(tmp_path) == files(of_two)


BY_TORCHRUN = """
import os, sys
from pathlib import Path
from tests.contract.diffsynth.resume_job import train

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
killed = {} if attempt else {"at": 6, "end": "SIGKILL", "only": 1}
train(Path(sys.argv[1]), seed=99 if attempt else 5, attempt=attempt, **killed)
"""


@pytest.mark.slow
@pytest.mark.sweep
def test_torchrun_starts_killed_processes_again_and_the_run_goes_on(tmp_path: Path, of_two: Path) -> None:
    """Without another command: `--max-restarts` alone."""
    (tmp_path / "train.py").write_text(BY_TORCHRUN)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    clean |= {"WANSHIM_FEATURES": f"none,{NAME}", "WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"}
    clean |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as in the recipes: pytorch/pytorch issue 135712
    command = ["torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node", "2"]
    found = subprocess.run(
        [sys.executable, "-m", "wanshim", "run", "--", sys.executable, "-m", *command, "train.py", str(tmp_path)],
        cwd=tmp_path, env=clean, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    assert "goes on from step" in found.stderr
    for rank in (0, 1):
        expected, resumed = seen(of_two, rank, 0), seen(tmp_path, rank, 1)
        assert 0 < len(resumed) < 8
        assert resumed == expected[-len(resumed) :]
    assert files(tmp_path) == files(of_two)
